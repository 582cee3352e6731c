"""The smallest device a run survives on, for whoever asks: some ten replays, too slow for a number beside a toggle."""

from __future__ import annotations

import dataclasses

import torch

from ..components.freezing import phase_recipes
from ..events import Cancel
from ..hardware import Device, target_device
from ..recipe import Recipe
from .assemble import line_up
from .estimate import BatchShape, Estimate
from .memory import smallest_capacity
from .run import as_traceable, traced_run
from .script import OUR_TRAINER
from .shape import full_shape


def with_smallest_capacity(
    estimate: Estimate,
    recipe: Recipe,
    device: Device | None = None,
    *,
    shape: BatchShape | None = None,
    cancel: Cancel | None = None,
) -> Estimate:
    """Return ``estimate`` with ``memory.smallest_capacity_bytes``.

    Args:
        estimate: Of the same Recipe, device and shape.
        recipe: The settings.
        device: The target; None takes the Recipe's.
        shape: Batches; None assumes that every sample fills ``max_length``.
        cancel: Looked at between replays.

    Returns:
        The same estimate where the question has no answer: on a CPU nothing is given back, and where a run is spread
        over several devices the events of a rank are not kept.

    Raises:
        Cancelled: The user cancelled.

    Example:
        >>> from workbench import Recipe, estimate_run, find_device
        >>> device = find_device("Tesla T4")
        >>> memory = with_smallest_capacity(estimate_run(Recipe(), device), Recipe(), device).memory
        >>> memory.smallest_capacity_bytes <= memory.process_bytes
        True
    """
    target = device or target_device(recipe)
    if not target.has_caching_allocator or recipe.sharding.num_processes > 1:
        return estimate
    parts = [one for one, _ in phase_recipes(recipe)] if len(recipe.phases.steps) > 1 else [recipe]
    least = max(_least(part, target, shape, cancel) for part in parts)
    memory = dataclasses.replace(estimate.memory, smallest_capacity_bytes=least)
    return dataclasses.replace(estimate, memory=memory)


def _least(recipe: Recipe, device: Device, shape: BatchShape | None, cancel: Cancel | None) -> int:
    batch = shape or full_shape(recipe)
    traced, _ = traced_run(as_traceable(recipe, batch, []), device, batch, OUR_TRAINER, None, cancel)
    if cancel is not None:
        cancel.check()
    return smallest_capacity(
        line_up(traced.life, recipe.training.gradient_accumulation_steps),
        device,
        torch_version=recipe.hardware.torch_version or torch.__version__,
        expandable_segments=recipe.hardware.expandable_segments,
    )
