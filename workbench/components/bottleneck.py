"""Bottleneck adapters: a small network behind attention and feed-forward of each layer, added to their output.

PEFT 0.21 has none. Each is ``x + up(gelu(down(x)))``; ``up`` starts at zero, so that training starts from the base
model exactly. It lies inside the module whose output it changes and is run by a hook on it, so that no layer of any
model is written anew.

Source:
    Houlsby et al., Parameter-Efficient Transfer Learning for NLP, 2019 (arXiv:1902.00751), with the activation of BERT.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ModelError
from .layers import decoder_layers
from .own_adapter import OwnAdapter, mark_adapter

CHILD = "bottleneck"
# Children of a layer whose output joins the residual stream, by transformers' names for them.
_ATTENTION = ("self_attn", "self_attention", "attn", "attention", "linear_attn", "mixer", "temporal_block")
_FEED_FORWARD = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "mlp_block", "fc2", "output")


class Bottleneck(nn.Module):
    """``x + up(gelu(down(x)))``.

    Args:
        width: Size of the model's hidden states.
        size: Size in the middle.
        dtype: Of the weights; computed in it where there is no autocast.
    """

    def __init__(self, width: int, size: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.down = nn.Linear(width, size, dtype=dtype)
        self.up = nn.Linear(size, width, dtype=dtype)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.down.bias)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states (B, S, width) of the same dtype."""
        change: Tensor = self.up(functional.gelu(self.down(hidden.to(self.down.weight.dtype))))
        return hidden + change.to(hidden.dtype)


def attach_bottlenecks(
    model: nn.Module,
    size: int,
    *,
    layers: Sequence[int] = (),
    in_float32: bool = True,
    train_whole: Sequence[str] = (),
    base_model: str = "",
) -> nn.Module:
    """Freeze the model and put a bottleneck behind attention and feed-forward of its layers.

    Args:
        model: The base, quantized or not, on any device.
        size: Size of each bottleneck's middle.
        layers: Indices of the layers that get some; empty means all.
        in_float32: Keep their weights in float32 where the base is in 16 bits.
        train_whole: Names of modules that train, and are saved, whole beside them.
        base_model: Written into the saved file.

    Returns:
        The same model.

    Raises:
        ModelError: A layer has no part that is known as attention or feed-forward.
    """
    for parameter in model.parameters():
        parameter.requires_grad = False
    weight_dtype = next((one.dtype for one in model.parameters() if one.dtype.is_floating_point), torch.float32)
    dtype = torch.float32 if in_float32 else weight_dtype
    config: Any = getattr(model, "config", None)
    width = int(config.get_text_config().hidden_size)
    for index, layer in enumerate(decoder_layers(model)):
        if layers and index not in layers:
            continue
        for part in _residual_parts(layer):
            device = next(part.parameters()).device
            with torch.device(device) if device.type == "meta" else contextlib.nullcontext():
                adapter = Bottleneck(width, size, dtype)
            part.add_module(CHILD, adapter.to(device))
            part.register_forward_hook(_add_bottleneck)
    whole = [f"{name}." for name, _ in model.named_modules() if name and name.rsplit(".", 1)[-1] in train_whole]
    names = []
    for name, parameter in model.named_parameters():
        if f".{CHILD}." in name or name.startswith(tuple(whole)):
            parameter.requires_grad = True
            names.append(name)
    settings = {"size": size, "layers": list(layers), "in_float32": in_float32, "train_whole": list(train_whole)}
    mark_adapter(model, OwnAdapter("bottleneck", base_model, settings, tuple(names)))
    return model


def _add_bottleneck(module: Any, _: Any, output: Any) -> Any:
    """Send a module's output (or the first of several) through its bottleneck."""
    if isinstance(output, tuple):
        return (module.bottleneck(output[0]), *output[1:])
    return module.bottleneck(output)


def _residual_parts(layer: nn.Module) -> list[nn.Module]:
    children = dict(layer.named_children())
    found = [
        next((children[name] for name in names if name in children), None) for names in (_ATTENTION, _FEED_FORWARD)
    ]
    parts = [part for part in found if part is not None and any(True for _ in part.parameters())]
    if not parts:
        raise ModelError(
            f"{type(layer).__name__} has no part known as attention or feed-forward (its parts are "
            f"{', '.join(children)}), so that no bottleneck can be put behind it. Set adapter.method=lora."
        )
    return parts
