"""A run in phases: each phase is estimated by itself; memory is that of the one that takes most."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..components.freezing import phase_recipes
from ..recipe import Recipe
from .estimate import Estimate


def estimate_phases(recipe: Recipe, estimate: Callable[[Recipe], Estimate]) -> Estimate:
    """Return the estimate of a run with several phases.

    Args:
        recipe: With more than one entry in ``phases.steps``.
        estimate: Estimates a Recipe of one phase.

    Returns:
        Memory and trainable parameters of the phase that takes most; time over all steps.
    """
    parts = [(estimate(one), steps) for one, steps in phase_recipes(recipe)]
    num_steps = sum(steps for _, steps in parts)
    highest = max(range(len(parts)), key=lambda index: parts[index][0].memory.process_bytes)
    largest = parts[highest][0]
    total_s = sum(part.time.step_s * steps for part, steps in parts)
    share = total_s / num_steps / largest.time.step_s
    costs = [part.time.cost_usd for part, _ in parts if part.time.cost_usd is not None]
    low, high = largest.time.interval_s
    per_tokens = largest.time.cost_usd_per_1000_tokens
    time = dataclasses.replace(
        largest.time,
        step_s=largest.time.step_s * share,
        tokens_per_s=largest.time.tokens_per_s / share,
        samples_per_s=largest.time.samples_per_s / share,
        seconds_by_class={name: seconds * share for name, seconds in largest.time.seconds_by_class.items()},
        seconds_by_limit={name: seconds * share for name, seconds in largest.time.seconds_by_limit.items()},
        flops=sum(part.time.flops * steps for part, steps in parts) / num_steps,
        interval_s=(low * share, high * share),
        total_s=total_s,
        num_steps=num_steps,
        cost_usd=(sum(cost[0] for cost in costs), sum(cost[1] for cost in costs)) if costs else None,
        cost_usd_per_1000_tokens=None if per_tokens is None else (per_tokens[0] * share, per_tokens[1] * share),
        epoch_s=None if largest.time.epoch_s is None else largest.time.epoch_s * share,
    )
    return dataclasses.replace(
        largest,
        recipe_digest=recipe.digest(),
        time=time,
        notes=[*largest.notes, f"Memory is that of phase {highest + 1} of {len(parts)}; the step is their mean."],
        elapsed_s=sum(part.elapsed_s for part, _ in parts),
        was_cached=all(part.was_cached for part, _ in parts),
    )
