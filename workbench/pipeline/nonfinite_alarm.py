"""What happens when a loss or gradient is NaN or Inf: gather what is known, run the step again, judge."""

from __future__ import annotations

import math
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..diagnose.finding import Finding
from ..diagnose.nonfinite import NonFiniteEvidence, judge_nonfinite
from .loop_hooks import MicroBatch, StepFacts
from .replay import (
    ReplayResult,
    Rerun,
    embedding_of,
    inputs_of,
    replay,
    rerun_of_model,
    rerun_of_source,
)

if TYPE_CHECKING:
    from .watching import Watch

# A GradScaler starts high and halves its scale at each overflow: so many skipped steps in a row are its settling.
SETTLING_SKIPS = 40


def explain_alarm(
    watch: Watch, loss: float | None, batch: Any, facts: StepFacts, frame: FrameType | None
) -> list[Finding]:
    """Return the findings of one alarm; empty when the value is harmless (a gradient scaler that settles)."""
    loss_is_bad = loss is not None and not math.isfinite(loss)
    if not loss_is_bad and facts.num_updates == 0 and watch.optimizer is not None:
        return []  # Nothing was to be updated: a scaler skipped the step, which is how it finds its scale.
    micro = _worst(facts)
    bad_weights = [name for name, p in _named(watch) if not bool(torch.isfinite(p.detach()).all())]
    inputs = inputs_of(micro)
    labels = inputs.get("labels")
    earlier = [norm for norm in list(watch.record.grad_norms)[:-1] if math.isfinite(norm)]
    seen = NonFiniteEvidence(
        step=watch.num_steps,
        loss=loss,
        grad_norm=facts.grad_norm,
        num_parameters=len(_named(watch)),
        bad_weights=bad_weights,
        bad_gradients=facts.bad_gradients,
        last_update=watch.last_update,
        earlier_losses=[value for value in list(watch.record.losses)[:-1][-50:] if math.isfinite(value)],
        median_grad_norm=float(np.median(earlier)) if earlier else None,
        num_supervised=int((labels[..., 1:] != -100).sum()) if isinstance(labels, Tensor) and labels.ndim > 1 else None,
        bad_inputs=[
            name
            for name, value in inputs.items()
            if value.is_floating_point() and "mask" not in name and not bool(torch.isfinite(value).all())
        ],
        bad_embedding_rows=_bad_embedding_rows(watch, inputs),
        was_blocked=facts.was_blocked,
    )
    result = None
    if not bad_weights and not seen.bad_inputs and seen.num_supervised != 0:
        result = _replay(watch, batch, micro, frame)
    if result is not None:
        seen.replayed, seen.replay_is_finite = True, result.is_finite
        seen.created, seen.first_nan = result.mode.created, result.mode.first_nan
        seen.max_forward = result.mode.max_forward
        seen.rows, seen.num_rows = result.rows, result.num_rows
        if result.rows and "input_ids" in inputs:
            seen.tokens = inputs["input_ids"][result.rows[0]].tolist()
    return [judge_nonfinite(seen)]


def _named(watch: Watch) -> list[tuple[str, Tensor]]:
    if watch.model is not None:
        return list(watch.model.named_parameters())
    names = watch.hooks.own_parameters()
    return [(names[id(parameter)], parameter) for parameter in watch.hooks.trained()]


def _worst(facts: StepFacts) -> MicroBatch | None:
    """Return the micro-batch whose own loss is bad, else the last with gradients."""
    trained = [micro for micro in facts.micro_batches if micro.had_grad] or facts.micro_batches
    for micro in trained:
        if micro.loss is not None and not bool(torch.isfinite(micro.loss).all()):
            return micro
    return trained[-1] if trained else None


def _bad_embedding_rows(watch: Watch, inputs: dict[str, Tensor]) -> list[int]:
    weight, ids = embedding_of(watch.model), inputs.get("input_ids")
    if weight is None or ids is None or ids.is_floating_point():
        return []
    used = torch.unique(ids[(ids >= 0) & (ids < weight.shape[0])])
    rows = weight.detach()[used]
    return [int(token) for token in used[~torch.isfinite(rows).all(-1)]]


def _replay(watch: Watch, batch: Any, micro: MicroBatch | None, frame: FrameType | None) -> ReplayResult | None:
    """Run the step again: as the trainer does, as the loop's source says, or as the model's own loss."""
    ways: list[Rerun | None] = []
    if watch.rerun_override is not None:
        ways.append(watch.rerun_override)
    elif frame is not None:
        ways.append(rerun_of_source(frame, batch))
    if micro is not None:
        ways.append(rerun_of_model(watch.hooks, micro))
    best: ReplayResult | None = None
    for way in ways:
        if way is None:
            continue
        result = replay(watch.hooks, way, micro)
        if result is not None and not result.is_finite:
            return result
        best = best or result
    return best
