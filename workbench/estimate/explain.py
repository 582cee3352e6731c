"""explain_run: an estimate with who lives at its peak, what comes next, how it grows, and why more is reserved."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import EstimateError
from ..events import MEMORY_CATEGORIES, Cancel, Progress, ProgressCallback
from ..hardware import Device, target_device
from ..recipe import Recipe
from .assemble import Schedule, line_up
from .capacity import with_smallest_capacity
from .estimate import BatchShape, Estimate
from .explanation import Explanation, Gap, Instant, MemoryPicture, Share
from .memory import Replay, alive_at, replay_schedule, starred
from .run import as_traceable, estimate_run, traced_run
from .script import OUR_TRAINER
from .shape import full_shape, reshaped

# Instants of the picture; the step with the peak gets most of them.
NUM_POINTS = 600
# Share of the height above the resting memory that a dip must have to part two hills.
DIP = 0.02
NUM_SHARES = 15
# Weights of a stretch's events when points are dealt out.
_PEAK_STEP, _OTHER, _LOADING = 4.0, 1.0, 0.25


def explain_run(
    recipe: Recipe,
    device: Device | None = None,
    *,
    shape: BatchShape | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> Estimate:
    """Return the estimate with its ``explanation`` and its slope per token.

    Args:
        recipe: The settings.
        device: The target; None takes the Recipe's.
        shape: Batches, from ``shape_of_data``; None assumes that every sample fills ``max_length``.
        progress: Told about the stage ``"explain"``.
        cancel: Looked at between estimates.

    Raises:
        RecipeError: Settings contradict each other or the device.
        ModelError: The model is unknown or cannot be built.
        EstimateError: The run cannot be traced.
        Cancelled: The user cancelled.
    """
    target = device or target_device(recipe)
    batch = shape or full_shape(recipe)
    told = _Told(progress)
    told("The estimate")
    estimate = estimate_run(recipe, target, shape=batch, cancel=cancel)
    estimate = with_smallest_capacity(estimate, recipe, target, shape=batch, cancel=cancel)
    told("The same with other lengths and batches")
    per_token, per_sample = _slopes(recipe, target, batch, estimate, cancel)
    told("Who lives at each instant")
    traced, _ = traced_run(as_traceable(recipe, batch, []), target, batch, OUR_TRAINER, None, cancel)
    schedule = line_up(traced.life, recipe.training.gradient_accumulation_steps)
    version = recipe.hardware.torch_version or torch.__version__
    expandable = recipe.hardware.expandable_segments
    replay = replay_schedule(schedule, target, version, expandable)
    reader = _Reader(schedule, replay)
    stopped = replay_schedule(schedule, target, version, expandable, stop=reader.peak + 1)
    explanation = reader.explain(_gaps(replay, stopped, reader.peak), per_token, per_sample)
    memory = dataclasses.replace(estimate.memory, bytes_per_token=per_token)
    notes = list(estimate.notes)
    if recipe.sharding.num_processes > 1:
        notes.append("The explanation is of one device that holds the whole model.")
    return dataclasses.replace(estimate, memory=memory, explanation=explanation, notes=notes)


class _Told:
    def __init__(self, progress: ProgressCallback | None) -> None:
        self._progress, self._done = progress, 0

    def __call__(self, message: str) -> None:
        if self._progress is not None:
            self._progress(Progress("explain", self._done, 3, message))
        self._done += 1


def _slopes(
    recipe: Recipe, device: Device, batch: BatchShape, estimate: Estimate, cancel: Cancel | None
) -> tuple[float | None, float | None]:
    """Return bytes per token of a micro-batch and per sample, by estimating a shorter and a larger batch."""
    peak = estimate.memory.peak_allocated_bytes

    def at(shape: BatchShape, changes: dict[str, Any]) -> int | None:
        try:
            other = estimate_run(recipe.with_changes(changes), device, shape=shape, cancel=cancel)
        except EstimateError:
            return None
        return other.memory.peak_allocated_bytes

    less = max(1, batch.length // 64) * 8
    length = batch.length - less if batch.length > less + 8 else batch.length + less
    shorter = at(dataclasses.replace(batch, length=length), {"data.max_length": max(8, length)})
    per_token = None if shorter is None else (peak - shorter) / ((batch.length - length) * batch.batch_size)
    more = recipe.training.per_device_train_batch_size + 1
    changes = {"training.per_device_train_batch_size": more}
    shape = reshaped(batch, recipe, recipe.with_changes(changes)) if more <= 4096 else batch
    larger = at(shape, changes) if more <= 4096 else None
    return per_token, None if larger is None else float(larger - peak)


def _gaps(whole: Replay, stopped: Replay, peak: int) -> list[Gap]:
    """Return why more is reserved than the tensors of the peak need; what they take adds up to the difference."""
    if stopped.allocator is None:
        return []
    stats = stopped.allocator.stats()
    segments, holes = stopped.allocator.unused_bytes()
    later = int(whole.reserved.max()) - stats.reserved
    found = [
        Gap(
            "rounding",
            stats.allocated - stats.requested,
            "blocks are rounded up to 512 bytes, and large ones keep up to 1 MiB that is not worth splitting off.",
        ),
        Gap(
            "holes",
            holes,
            "Free pieces lie between blocks in use. Nothing as large as what is asked for fits into them, so that the "
            "allocator takes more from the driver; hardware.expandable_segments makes them fewer.",
        ),
        Gap(
            "segments",
            segments,
            "Whole segments are kept from earlier instants, for sizes the peak has no use for. They are given back "
            "when the driver has no more, so that they alone make no run fail.",
        ),
        Gap("later", later, "After the peak still more is reserved, for requests that fit into no cached block."),
    ]
    return sorted((gap for gap in found if gap.num_bytes > 0), key=lambda gap: -gap.num_bytes)


class _Reader:
    """Reads a replayed schedule."""

    def __init__(self, schedule: Schedule, replay: Replay) -> None:
        self.schedule, self.replay = schedule, replay
        self.peak = int(np.argmax(replay.allocated))
        tape = schedule.life.tape
        self.sources = schedule.life.sources[schedule.sources]
        names = starred(tuple(tape.module_names))
        self.modules = list(dict.fromkeys(names))
        place = {name: index for index, name in enumerate(self.modules)}
        by_tape = np.array([place[name] for name in names], dtype=np.int64)
        self.module_of = by_tape[np.array(tape.modules, dtype=np.int64)[self.sources]]
        self.operator_of = np.array(tape.operators, dtype=np.int64)[self.sources]

    def explain(self, gaps: list[Gap], per_token: float | None, per_sample: float | None) -> Explanation:
        after, repeats = self._next_highest()
        points = self._points([self.peak] + ([after] if after is not None else []))
        alive = alive_at(self.schedule, self.peak)
        categories = self.schedule.categories[alive]
        operators = [*self.schedule.life.tape.operator_names, "weights"]
        is_weight = categories == MEMORY_CATEGORIES.index("parameter")
        made_by = np.where(is_weight, len(operators) - 1, self.operator_of[alive])
        workspace = self.replay.workspace if self.peak >= self.replay.workspace_from else 0
        kinds = self._shares(categories, alive, MEMORY_CATEGORIES)
        if workspace:
            kinds = sorted([*kinds, Share("workspace", workspace, 2)], key=lambda share: -share.num_bytes)
        return Explanation(
            peak=self._instant(self.peak, points, repeats),
            next_highest=None if after is None else self._instant(after, points, 1),
            by_category=kinds,
            by_module=self._shares(self.module_of[alive], alive, self.modules),
            by_operator=self._shares(made_by, alive, operators),
            bytes_per_token=per_token,
            bytes_per_sample=per_sample,
            gaps=gaps,
            picture=self._picture(points, after),
        )

    def _shares(self, keys: Any, alive: Any, names: Sequence[str]) -> list[Share]:
        sizes = self.schedule.sizes[alive].astype(np.float64)
        sums = np.bincount(keys, weights=sizes, minlength=len(names))
        counts = np.bincount(keys, minlength=len(names))
        order = np.argsort(-sums, kind="stable")[:NUM_SHARES]
        return [Share(names[index], int(sums[index]), int(counts[index])) for index in order if sums[index] > 0]

    def _label(self, event: int) -> tuple[int, int, int]:
        token = int(self.schedule.events[event])
        token = token if token >= 0 else ~token
        return int(self.schedule.phases[event]), int(self.module_of[token]), int(self.operator_of[token])

    def _instant(self, event: int, points: Any, repeats: int) -> Instant:
        phase, module, operator = self._label(event)
        tape = self.schedule.life.tape
        step = next(item.step for item in self.schedule.stretches if item.begin <= event < item.end)
        return Instant(
            point=int(np.searchsorted(points, event)),
            phase=tape.phase_names[phase],
            step=step,
            module=self.modules[module],
            operator=tape.operator_names[operator],
            allocated_bytes=int(self.replay.allocated[event]),
            repeats=repeats,
        )

    def _next_highest(self) -> tuple[int | None, int]:
        """Return the highest hill at another place than the peak's, and how often the peak's place comes as high."""
        allocated = self.replay.allocated
        top, label = int(allocated[self.peak]), self._label(self.peak)
        floor = int(allocated[self.schedule.stretches[-1].end - 1])
        hills = find_hills(allocated, max(1, round(DIP * (top - floor))))
        same = [hill for hill in hills if self._label(hill) == label and allocated[hill] >= (1 - DIP) * top]
        others = [hill for hill in hills if self._label(hill) != label]
        return max(others, key=lambda hill: int(allocated[hill]), default=None), max(1, len(same))

    def _points(self, wanted: list[int]) -> Any:
        """Return the events of the picture: of each stretch of events the highest, most of them in the peak's step."""
        stretches = [item for item in self.schedule.stretches if item.end > item.begin]
        step = next(item.step for item in stretches if item.begin <= self.peak < item.end)
        weights = [
            (item.end - item.begin)
            * (_LOADING if item.name in ("load", "prepare", "adapter") else _PEAK_STEP if item.step == step else _OTHER)
            for item in stretches
        ]
        chosen: set[int] = set(wanted)
        for item, weight in zip(stretches, weights, strict=True):
            count = max(2, round(NUM_POINTS * weight / sum(weights)))
            edges = np.unique(np.linspace(item.begin, item.end, min(count, item.end - item.begin) + 1).astype(np.int64))
            for begin, end in itertools.pairwise(edges.tolist()):
                chosen.add(begin + int(np.argmax(self.replay.allocated[begin:end])))
        return np.array(sorted(chosen), dtype=np.int64)

    def _picture(self, points: Any, after: int | None) -> MemoryPicture:
        schedule, replay = self.schedule, self.replay
        events = schedule.events
        tokens = np.where(events >= 0, events, ~events)
        signed = np.where(events >= 0, 1, -1) * schedule.sizes[tokens]
        keys = schedule.categories[tokens].astype(np.int64) * len(self.modules) + self.module_of[tokens]
        used, columns = np.unique(keys, return_inverse=True)
        holders = np.zeros((len(points), len(used)), dtype=np.int64)
        begin = 0
        for row, point in enumerate(points.tolist()):
            np.add.at(holders[row], columns[begin : point + 1], signed[begin : point + 1])
            begin = point + 1
        holders = np.cumsum(holders, axis=0)
        names = [
            (MEMORY_CATEGORIES[key // len(self.modules)], self.modules[key % len(self.modules)])
            for key in used.tolist()
        ]
        series: dict[str, list[int]] = {}
        for category in MEMORY_CATEGORIES:
            mask = np.array([name[0] == category for name in names], dtype=bool)
            if mask.any():
                series[category] = holders[:, mask].sum(axis=1).tolist()
        if replay.workspace:
            series["workspace"] = np.where(points >= replay.workspace_from, replay.workspace, 0).tolist()
        stretch_of = np.searchsorted([item.end for item in schedule.stretches], points, side="right")
        steps = [schedule.stretches[index].step for index in stretch_of.tolist()]
        phases = [schedule.life.tape.phase_names[index] for index in schedule.phases[points].tolist()]
        peak = int(np.searchsorted(points, self.peak))
        mine = [index for index, step in enumerate(steps) if step == steps[peak]]
        near = (mine[0], mine[-1]) if steps[peak] is not None else (max(0, peak - 60), min(len(points) - 1, peak + 60))
        return MemoryPicture(
            bytes_by_category=series,
            reserved_bytes=replay.reserved[points].tolist() if replay.allocator is not None else (),
            phases=_changes(phases),
            steps=_changes(steps),
            peak=peak,
            next_highest=-1 if after is None else int(np.searchsorted(points, after)),
            window=near,
            keys=names,
            holders=holders,
        )


def _changes(values: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return ``(index, value)`` where a sequence takes another value."""
    return [(index, value) for index, value in enumerate(values) if index == 0 or value != values[index - 1]]


def find_hills(values: Any, dip: int) -> list[int]:
    """Return the tops of the hills of a curve, ascending.

    Args:
        values: int64 array.
        dip: Two tops are parted by a dip at least this deep below the lower one.
    """
    steps = np.diff(values)
    turns = [0, *(np.flatnonzero(steps[:-1] * steps[1:] <= 0) + 1).tolist(), len(values) - 1]
    tops: list[int] = []
    top, bottom, is_rising = 0, int(values[0]), True
    for index in turns:
        value = int(values[index])
        if is_rising and value >= int(values[top]):
            top = index
        elif is_rising and int(values[top]) - value >= dip:
            tops.append(top)
            bottom, is_rising = value, False
        elif not is_rising and value < bottom:
            bottom = value
        elif not is_rising and value - bottom >= dip:
            top, is_rising = index, True
    return [*tops, top] if is_rising else tops
