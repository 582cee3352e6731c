"""Settings that fit after an out-of-memory error, each checked by the estimator, ranked by what they cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ..diagnose.finding import Fix
from ..diagnose.oom import OomEvidence
from ..errors import EstimateError, ModelError, RecipeError
from ..estimate import BatchShape, Estimate, estimate_run
from ..estimate.shape import full_shape, reshaped
from ..events import Cancel
from ..hardware import Device
from ..plan.plan import PlanOption
from ..plan.search import find_settings
from ..recipe import Recipe, find_problems
from ..units import format_bytes, format_seconds

# Settings that are looked through for one failure, and remedies that are shown.
BUDGET = 40
MAX_FIXES = 5
# Where the prediction said that the settings fit, its word for others is taken with this much less memory.
DISTRUST = 0.97
_EVALUATION = "evaluation.per_device_eval_batch_size"
_STORAGE = "training.activation_storage"


def find_remedies(
    recipe: Recipe,
    device: Device,
    shape: BatchShape | None,
    seen: OomEvidence,
    *,
    here: Device | None = None,
    cancel: Cancel | None = None,
) -> tuple[list[Fix], Estimate | None]:
    """Return settings that fit, the cheapest first, and the estimate of the settings that did not.

    Training settings keep the effective batch, and are left alone where the evaluation ran out.

    Args:
        recipe: The settings that did not fit.
        device: The device that was full.
        shape: Batches of the run's data; None assumes full samples.
        seen: What was found at the failure: its phase, and what the prediction missed.
        here: The device that the run really is on, where it only pretends to be on ``device``: what it cannot do is
            not offered.
        cancel: Looked at in every estimate.
    """
    left_alone = () if here is None or _can_run(recipe, {_STORAGE: "offload"}, here) else (_STORAGE,)
    shape = shape or full_shape(recipe)
    try:
        now = estimate_run(recipe, device, shape=shape, cancel=cancel)
    except (RecipeError, EstimateError, ModelError):
        return [], None
    smaller = dataclasses.replace(device, capacity_bytes=trusted_capacity(device, now, seen))
    if seen.phase == "evaluation":
        return _for_evaluation(recipe, smaller, shape, now, cancel), now
    try:
        front = find_settings(
            recipe,
            smaller,
            shape=shape,
            pinned=(_EVALUATION, *left_alone),
            freedom="numerics",
            budget=BUDGET,
            cancel=cancel,
        )
        options = [option for option in front.options if option.changes]
        if not options:
            front = find_settings(
                recipe, smaller, shape=shape, pinned=left_alone, freedom="method", budget=BUDGET, cancel=cancel
            )  # fmt: skip
            options = [option for option in front.options if option.changes]
    except (RecipeError, EstimateError, ModelError):
        return [], now
    options = [option for option in options if here is None or _can_run(recipe, option.changes, here)]
    # What surely fits first, then what alters nothing else, then by the time of a step.
    ranked = sorted(options, key=lambda option: (option.verdict != "fits", len(option.alters), option.step_s))
    fixes = [
        _fix(option.changes, option.process_bytes, option.step_s, now, device, words=_words(option))
        for option in ranked[:MAX_FIXES]
    ]
    return fixes, now


def _can_run(recipe: Recipe, changes: Mapping[str, Any], here: Device) -> bool:
    """Whether a device takes these settings for a run."""
    try:
        return not find_problems(recipe.with_changes(changes), here.facts(for_estimate=False))
    except RecipeError:
        return False


def trusted_capacity(device: Device, now: Estimate, seen: OomEvidence) -> int:
    """Return the bytes that settings may be predicted to need.

    What other processes hold is not there. And where more was needed than predicted, as much may be missing in the
    predictions of other settings; they are held to a smaller device, on which those that failed are seen to fail.
    """
    capacity = device.capacity_bytes - seen.other_bytes
    capacity -= max(0, seen.needed_bytes - now.memory.process_bytes) if seen.bill else 0
    if now.memory.verdict != "does_not_fit":
        capacity = min(capacity, round(now.memory.process_bytes * DISTRUST))
    return max(1, capacity)


def _for_evaluation(
    recipe: Recipe, device: Device, shape: BatchShape, now: Estimate, cancel: Cancel | None
) -> list[Fix]:
    """Return smaller evaluation batches, the largest that fits first; each counts for the evaluation alone."""
    fixes = []
    for size in _halves(recipe.evaluation.per_device_eval_batch_size):
        changes = {_EVALUATION: size}
        changed = recipe.with_changes(changes)
        try:
            estimate = estimate_run(changed, device, shape=reshaped(shape, recipe, changed), cancel=cancel)
        except (RecipeError, EstimateError, ModelError):
            continue
        peak = evaluation_bytes(estimate)
        if peak <= device.capacity_bytes and peak < evaluation_bytes(now):
            words = ["training stays as it is"]
            fixes.append(_fix(changes, peak, estimate.time.step_s, now, device, words=words))
    return fixes[:MAX_FIXES]


def evaluation_bytes(estimate: Estimate) -> int:
    """Return what the process needs at the evaluation's own peak."""
    memory = estimate.memory
    outside = memory.process_bytes - memory.peak_allocated_bytes
    return memory.peak_by_phase.get("evaluation", memory.peak_allocated_bytes) + outside


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        size //= 2
        yield size


def _fix(
    changes: Mapping[str, Any],
    process_bytes: int,
    step_s: float,
    now: Estimate,
    device: Device,
    *,
    words: list[str],
) -> Fix:
    settings = " and ".join(f"{path.rpartition('.')[2]}={value}" for path, value in changes.items())
    parts = [f"predicted peak {format_bytes(process_bytes)} of {format_bytes(device.capacity_bytes)}"]
    slower = step_s / now.time.step_s - 1 if now.time.step_s else 0.0
    change = f"{100 * slower:+.0f} %" if abs(slower) >= 0.005 else "as before"
    parts.append(f"{format_seconds(step_s)} per step ({change})")
    return Fix(f"Set {settings}: {', '.join(parts + words)}.", dict(changes), process_bytes, step_s)


def _words(option: PlanOption) -> list[str]:
    """Return what a person should know of an option beside its memory and time."""
    words = ["same effective batch"] if "training.gradient_accumulation_steps" in option.changes else []
    words += [f"it {alter}" for alter in option.alters]
    return words + (["tight"] if option.verdict != "fits" else [])
