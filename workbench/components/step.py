"""One micro-step: the forward and backward pass that the trainer runs and the trace replays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..recipe import Recipe
from .loss import compute_loss
from .precision import Precision


def micro_step(
    recipe: Recipe,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    num_items: Tensor | int | None,
    precision: Precision,
    scaler: Any | None = None,
) -> Tensor:
    """Run forward and backward of one micro-batch; gradients are added to ``.grad``.

    Autocast is entered here and not by accelerate, which would also keep a float32 copy of the model's outputs. As
    there, it covers the forward pass with its loss, and not backward.

    Args:
        recipe: The settings.
        model: The model from ``build_model``.
        batch: Tensors on the model's device.
        num_items: Supervised tokens of the whole optimizer step, see ``compute_loss``.
        precision: From ``resolve_precision``.
        scaler: A ``torch.amp.GradScaler`` where ``precision.uses_grad_scaler``.

    Returns:
        The unscaled loss, detached: its share of the mean over the step's supervised tokens.
    """
    with precision.autocast(batch["input_ids"].device.type):
        loss = compute_loss(recipe, model, batch, num_items)
    (loss if scaler is None else scaler.scale(loss)).backward()
    return loss.detach()
