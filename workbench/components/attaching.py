"""Attach an adapter of the workbench's own that lies in a folder."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..errors import ModelError
from .bottleneck import attach_bottlenecks
from .own_adapter import OwnAdapter, read_own_adapter


def attach_own_adapter(model: nn.Module, folder: Path) -> OwnAdapter:
    """Attach the adapter of ``folder`` to its base model, with its weights.

    Raises:
        ModelError: The folder cannot be read, or the adapter is of another model.
    """
    adapter, tensors = read_own_adapter(folder)
    if adapter.kind == "bottleneck":
        attach_bottlenecks(model, base_model=adapter.base_model, **adapter.settings)
    shapes = {name: one.shape for name, one in model.named_parameters()}
    wrong = [name for name, one in tensors.items() if shapes.get(name) != one.shape]
    if wrong:
        raise ModelError(
            f"{folder} holds an adapter of {adapter.base_model}, which this model is not: {len(wrong)} tensors do not "
            f"fit, such as {wrong[0]}. Give the base that it was trained on."
        )
    model.load_state_dict(tensors, strict=False)
    return adapter
