"""How a model repeats itself: the number of its layers and the period after which their kinds recur."""

from __future__ import annotations

from typing import Any

from torch import nn

from .tape import NO_LAYER, layer_of


def layer_lists(model: nn.Module) -> dict[str, int]:
    """Return ``{path: length}`` of the lists that hold repeated layers."""
    return {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0 and any(True for _ in module[0].children())
    }


def layer_period(model: nn.Module, config: Any) -> int | None:
    """Return after how many layers the kinds of layers recur (1 where all are equal), or None where they never do.

    Args:
        model: The whole model on the meta device.
        config: Its text config.
    """
    lists = layer_lists(model)
    count = config.num_hidden_layers
    whole = [name for name, length in lists.items() if length == count]
    if len(whole) != 1:
        return None  # No list of layers, or several (encoder and decoder): traced whole.
    kinds: list[list[Any]] = [[] for _ in range(count)]
    for name, parameter in model.named_parameters():
        index = layer_of(name, frozenset(whole))
        if index != NO_LAYER:
            suffix = name.split(f"{whole[0]}.{index}.", 1)[-1]
            kinds[index].append((suffix, tuple(parameter.shape), parameter.dtype))
    for value in vars(config).values():
        if isinstance(value, (list, tuple)) and len(value) == count:
            for index, item in enumerate(value):
                kinds[index].append(str(item))
    texts = [repr(kind) for kind in kinds]
    for period in range(1, count // 2 + 1):
        if all(texts[index] == texts[index % period] for index in range(count)):
            return period
    if count > 2 and len(set(texts[1:])) == 1:
        return 1  # Only the first differs (RWKV normalises the embeddings in it): it is traced for itself anyhow.
    return None
