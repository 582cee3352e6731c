"""Pruning: weights that are set to zero once and stay zero while the run goes on.

Which ones is decided by ``torch.nn.utils.prune``. Its own way of holding them (``weight_orig``, a mask beside it, and
their product kept for every layer) would rename what is saved and keep two more copies of every weight; here the weight
itself is zeroed, its gradient is zeroed at the same places before anything reads it, and the zeros are written again
after each update, whatever the optimizer did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ..errors import ModelError
from ..recipe import Recipe
from .layers import decoder_layers

MASKS = "pruning_masks.safetensors"
_BUFFER = "weight_is_pruned"
_ADDED = ("lora_", "bottleneck")


def prunable(model: Any) -> dict[str, Any]:
    """Return the matrices of the repeated layers by the base model's names; embeddings and head stay whole.

    Args:
        model: With or without an adapter around it.

    Raises:
        ModelError: The model has no list of equal layers.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    inside = {id(module) for layer in decoder_layers(base) for module in layer.modules()}
    found = {}
    for name, module in base.named_modules():
        is_matrix = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if is_matrix and id(module) in inside and not any(part in name for part in _ADDED):
            found[name.removesuffix(".base_layer").replace(".base_layer.", ".")] = module
    return found


def choose_masks(recipe: Recipe, model: Any) -> dict[str, Tensor]:
    """Return for each prunable matrix which of its weights go: bool, of the weight's shape, True where pruned.

    Raises:
        ModelError: The model has no list of equal layers.
    """
    modules, wanted = prunable(model), recipe.pruning
    pairs: Any = [(module, "weight") for module in modules.values()]
    trains = [module.weight.requires_grad for module in modules.values()]
    if wanted.method == "l1_global":
        prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=wanted.amount)
    else:
        for module, name in pairs:
            # Rows of outputs; a Conv1D has its weight transposed.
            prune.ln_structured(module, name, amount=wanted.amount, n=2, dim=0 if isinstance(module, nn.Linear) else 1)
    masks = {name: module.weight_mask == 0 for name, module in modules.items()}
    for module, requires_grad in zip(modules.values(), trains, strict=True):
        prune.remove(module, "weight")
        module.weight.requires_grad = bool(requires_grad)  # torch's function makes every weight trainable.
    return masks


def apply_masks(model: Any, masks: Mapping[str, Tensor]) -> list[nn.Module]:
    """Set the weights to zero where the masks say so.

    Returns:
        The modules whose weights train, for ``write_zeros`` after each update.

    Raises:
        ModelError: A mask belongs to no matrix of this model.
    """
    modules, held = prunable(model), []
    for name, mask in masks.items():
        module: Any = modules.get(name)
        if module is None or module.weight.shape != mask.shape:
            raise ModelError(f"A pruning mask is for {name}, which this model does not have in that shape.")
        mask = mask.to(module.weight.device)
        with torch.no_grad():
            module.weight.masked_fill_(mask, 0)
        if module.weight.requires_grad:
            hold_zeros(module, mask)
            held.append(module)
    return held


def hold_zeros(module: Any, mask: Tensor) -> None:
    """Keep a mask beside a weight that trains, and take the masked gradients out before they are added up."""
    if not hasattr(module, _BUFFER):
        # The hook reads the buffer, so that it moves with the module.
        module.weight.register_hook(lambda gradient: gradient.masked_fill(getattr(module, _BUFFER), 0))
    module.register_buffer(_BUFFER, mask, persistent=False)


def hold_on_meta(recipe: Recipe, model: Any) -> None:
    """Give a model without storage the masks and hooks that a pruned run has, for the trace."""
    if recipe.pruning.method == "none" or recipe.adapter.method != "none":
        return  # Weights that are frozen keep no mask.
    for module in prunable(model).values():
        weight: Any = module.weight
        if weight.requires_grad:
            hold_zeros(module, torch.empty(weight.shape, dtype=torch.bool, device=weight.device))


def write_zeros(modules: Sequence[Any]) -> None:
    """Write the zeros again, after an update of these modules' weights."""
    with torch.no_grad():
        for module in modules:
            module.weight.masked_fill_(getattr(module, _BUFFER), 0)


def sparsity_by_layer(model: Any) -> dict[str, float]:
    """Return the share of zeros in the matrices of each layer by its index as text, and of all as ``"all"``."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    layer_of = {id(part): index for index, layer in enumerate(decoder_layers(base)) for part in layer.modules()}
    counts: dict[int, list[int]] = {}
    for module in prunable(model).values():
        weight: Any = module.weight
        count = counts.setdefault(layer_of[id(module)], [0, 0])
        count[0] += int((weight == 0).sum())
        count[1] += weight.numel()
    shares = {str(index): zeros / total for index, (zeros, total) in sorted(counts.items())}
    return {**shares, "all": sum(one[0] for one in counts.values()) / sum(one[1] for one in counts.values())}


def save_masks(model: Any, folder: Path) -> None:
    """Write which weights are pruned, a bit each."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, mask in _masks_of(model):
        tensors[name] = _pack(mask)
    shapes = {name: ",".join(map(str, module.weight.shape)) for name, module in prunable(model).items()}
    save_file(tensors, folder / MASKS, metadata=shapes)


def read_masks(folder: Path) -> dict[str, Tensor] | None:
    """Return the masks that ``save_masks`` wrote, or None where the folder has none.

    Raises:
        ModelError: The file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / MASKS
    if not path.is_file():
        return None
    masks = {}
    try:
        with safe_open(path, framework="pt") as file:
            shapes = file.metadata()
            for name in file.keys():  # noqa: SIM118  # not a dict
                shape = tuple(int(size) for size in shapes[name].split(","))
                masks[name] = _unpack(file.get_tensor(name), shape)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}). Use another checkpoint or result.") from error
    return masks


def _masks_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, module in prunable(model).items():
        mask: Any = getattr(module, _BUFFER, None)
        yield name, (module.weight == 0 if mask is None else mask)


def _pack(mask: Tensor) -> Tensor:
    bits = nn.functional.pad(mask.flatten().to(torch.uint8).cpu(), (0, -mask.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.int64).to(torch.uint8)


def _unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    count = int(torch.tensor(shape).prod())
    return bits.flatten()[:count].bool().view(shape)
