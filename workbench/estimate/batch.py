"""The batch that a trace feeds to a model: meta tensors of the shapes that the collator would make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..components.task import CLASSIFICATION, IMAGE_TEXT
from ..components.task_data import TASK
from ..recipe import Recipe
from .images import image_inputs


def batch_of(recipe: Recipe, model: Any, size: tuple[int, int], *, padded: bool, packed: bool) -> dict[str, Tensor]:
    """Return the inputs of one micro-batch.

    Args:
        recipe: ``model.task`` decides what the model takes.
        model: The model on the meta device.
        size: Samples, and tokens of each.
        padded: Whether a mask is passed.
        packed: Whether position ids are passed.
    """
    batch = {"input_ids": _integers(size)}
    batch["labels"] = _integers(size[:1] if recipe.model.task == CLASSIFICATION else size)
    if padded:
        batch["attention_mask"] = _integers(size)
    if recipe.tasks.data:
        batch[TASK] = _integers(size[:1])
    if packed:
        batch["position_ids"] = _integers(size)
    if recipe.model.task == IMAGE_TEXT:
        batch |= image_inputs(model, size)
    return batch


def _integers(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")
