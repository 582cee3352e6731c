"""What compressed activations do to the gradients, measured before the first step on a sample of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..components.activations import whole_activations
from ..components.loss import count_items
from ..components.step import micro_step
from .build import Run
from .checkpoint import random_state, set_random_state
from .explain import is_out_of_memory

# Whole activations of a long sample may not fit where the compressed ones of the run do.
MAX_TOKENS = 256
# Samples looked through for one that is learned from in its first tokens.
MAX_LOOKED_AT = 50


def measure_gradient_error(run: Run, order: Sequence[int]) -> dict[str, Any] | None:
    """Return the data of a ``"log"`` event with the gradient's relative error; None where nothing is compressed.

    Both gradients are of the same tokens, weights and random state; the model, its gradients and every random generator
    are then as they were.

    Args:
        run: What was built; before its first step.
        order: Numbers of the training samples as the first epoch takes them.
    """
    storage = run.recipe.training.activation_storage
    if storage not in ("8bit", "4bit"):
        return None
    batch = _first_batch(run, order)
    if batch is None:
        return {"message": "The error of compressed activations was not measured: no short sample is learned from."}
    state = random_state()
    try:
        whole = _gradients(run, batch, state, is_whole=True)
        error = _difference(whole, _gradients(run, batch, state, is_whole=False))
    except Exception as failure:
        if not is_out_of_memory(failure):
            raise
        return {"message": "The error of compressed activations was not measured: whole ones do not fit."}
    finally:
        run.model.zero_grad(set_to_none=True)
        set_random_state(state)
    percent = f"{100 * error:.2g} %"
    return {
        "gradient_error": error,
        "message": f"Activations in {storage.removesuffix('bit')} bits: the gradient of the first sample is off by "
        f"{percent} of its norm ({batch['input_ids'].numel()} tokens).",
    }


def _first_batch(run: Run, order: Sequence[int]) -> dict[str, Tensor] | None:
    for row in order[:MAX_LOOKED_AT]:
        batch = run.collator([run.data.train[int(row)]])
        shape = batch["input_ids"].shape
        cut = {name: value[:, :MAX_TOKENS] if value.shape == shape else value for name, value in batch.items()}
        if count_items([cut]):
            return cut
    return None


def _gradients(run: Run, batch: dict[str, Tensor], state: dict[str, Any], *, is_whole: bool) -> list[Tensor]:
    run.model.train()
    run.model.zero_grad(set_to_none=True)
    set_random_state(state)
    device = next(run.model.parameters()).device
    moved = {name: value.to(device) for name, value in batch.items()}
    with whole_activations() if is_whole else contextlib.nullcontext():
        micro_step(run.recipe, run.model, moved, count_items([batch]), run.precision)
    return [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]


def _difference(whole: list[Tensor], stored: list[Tensor]) -> float:
    """Return the norm of the difference by the norm of ``whole``."""
    off = torch.nn.utils.get_total_norm([one.float() - other.float() for one, other in zip(whole, stored, strict=True)])
    norm = torch.nn.utils.get_total_norm([one.float() for one in whole])
    return float(off / norm) if float(norm) > 0 else 0.0
