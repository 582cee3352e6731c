"""The step time of one device, turned into that of a layout: communication, bubble, fewer steps, more to pay."""

from __future__ import annotations

import dataclasses
import math

from ..recipe import Recipe
from .estimate import BatchShape, TimeEstimate
from .layout import LayoutEstimate


def spread_time(alone: TimeEstimate, row: LayoutEstimate, recipe: Recipe, shape: BatchShape) -> TimeEstimate:
    """Return the time of a step, the run and an epoch under a layout, and what all its devices cost.

    Args:
        alone: The same Recipe on one device.
        row: The layout.
        recipe: Accumulation, steps and epochs.
        shape: Batches of one rank.
    """
    step_s, layout = row.overlapped_s, row.layout
    visible_s = sum(item.seconds - item.hidden_s for item in row.traffic)
    scale = row.compute_s / alone.step_s
    classes = {name: seconds * scale for name, seconds in alone.seconds_by_class.items()}
    classes |= {"communication": visible_s, "bubble": row.bubble_s}
    low, high = (edge / alone.step_s * step_s for edge in alone.interval_s)
    per_epoch = None
    if shape.num_samples is not None:
        batches = math.ceil(shape.num_samples / (shape.batch_size * layout.data_parallel))
        per_epoch = max(1, math.ceil(batches / row.accumulation))
    num_steps = alone.num_steps
    if recipe.training.max_steps <= 0 and per_epoch is not None:
        num_steps = max(1, math.ceil(per_epoch * recipe.training.num_train_epochs))
    samples = shape.batch_size * row.accumulation * layout.data_parallel
    total_s = None if num_steps is None else num_steps * step_s
    cost = per_1000 = None
    if alone.cost_usd is not None and alone.total_s and total_s is not None:
        rates = [usd / alone.total_s for usd in alone.cost_usd]
        cost = (rates[0] * total_s * layout.num_devices, rates[1] * total_s * layout.num_devices)
    if alone.cost_usd_per_1000_tokens is not None:
        dearer = layout.num_devices * alone.tokens_per_s / row.tokens_per_s
        per_1000 = (alone.cost_usd_per_1000_tokens[0] * dearer, alone.cost_usd_per_1000_tokens[1] * dearer)
    return dataclasses.replace(
        alone,
        step_s=step_s,
        tokens_per_s=row.tokens_per_s,
        samples_per_s=samples / step_s,
        seconds_by_class={name: seconds for name, seconds in classes.items() if seconds},
        interval_s=(low, high),
        total_s=total_s,
        num_steps=num_steps,
        cost_usd=cost,
        cost_usd_per_1000_tokens=per_1000,
        epoch_s=None if per_epoch is None else per_epoch * step_s,
    )
