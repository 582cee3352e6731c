"""The largest batch, sequence length and model that fit, everything else kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..components.catalogue import CatalogueRow, catalogue
from ..components.source import find_source
from ..errors import EstimateError, ModelError, RecipeError
from ..estimate import BatchShape
from ..estimate.estimate import Estimate
from ..estimate.shape import full_shape
from ..events import Cancel, ProgressCallback
from ..hardware import Device
from ..recipe import Recipe, field_info
from ..units import format_bytes
from .plan import Largest, Tried
from .planner import Planner
from .space import SPLIT_FIELDS

# Estimates a search for a number takes at most; doubling and halving over the whole range needs fewer.
MAX_TRIES = 40
# Lengths are searched in steps of this many tokens: kernels work on multiples of it.
LENGTH_STEP = 64
MODEL_BUDGET = 24
# Larger models that are still tried after one that does not fit: with another shape a larger one may take less.
MISSES = 3


def largest_batch(
    recipe: Recipe,
    device: Device | None = None,
    *,
    shape: BatchShape | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> Largest:
    """Find the most samples in one forward pass that surely fit.

    ``changes`` takes the largest of them that divides the effective batch, which stays.

    Args:
        recipe: The settings.
        device: The target; None takes the Recipe's.
        shape: Batches, from ``shape_of_data``; None assumes that every sample fills ``max_length``.
        progress: Told about the stage ``"plan"``.
        cancel: Looked at in every estimate.

    Raises:
        RecipeError: The recipe itself is wrong.
        ModelError: The model is unknown.
        EstimateError: The run cannot be traced.
        Cancelled: The user cancelled.
    """
    planner = Planner(recipe, device, shape, progress, cancel)
    highest = int(field_info(SPLIT_FIELDS[0]).maximum or 4096)
    if planner.shape.num_samples is not None:
        highest = min(highest, planner.shape.num_samples)
    ladder = _Ladder(planner, lambda value: {SPLIT_FIELDS[0]: value}, "batch")
    value = ladder.climb(1, highest, start=min(recipe.training.per_device_train_batch_size, highest))
    changes: dict[str, Any] = {}
    if value is not None:
        effective = recipe.training.effective_batch_size
        size = max(size for size in range(1, min(value, effective) + 1) if effective % size == 0)
        changes = dict(zip(SPLIT_FIELDS, (size, effective // size), strict=True))
    most = f"{highest} samples are the most that can be in one batch."
    return _answer(planner, "batch", value, changes, ladder, most)


def largest_length(
    recipe: Recipe,
    device: Device | None = None,
    *,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> Largest:
    """Find the longest samples that surely fit, in steps of 64 tokens, every sample taken to be that long.

    Args:
        recipe, device, progress, cancel: As for ``largest_batch``.

    Raises:
        RecipeError, ModelError, EstimateError, Cancelled: As ``largest_batch``.
    """
    planner = Planner(recipe, device, full_shape(recipe), progress, cancel)
    config = find_source(recipe, for_training=False, cancel=cancel).config.get_text_config()
    trained = int(getattr(config, "max_position_embeddings", 0) or 0)
    highest = min(trained or 1_048_576, int(field_info("data.max_length").maximum or 1_048_576))
    ladder = _Ladder(planner, lambda value: {"data.max_length": value}, "length")
    step = LENGTH_STEP if highest >= LENGTH_STEP else int(field_info("data.max_length").minimum or 1)
    start = max(step, min(recipe.data.max_length, highest) // step * step)
    value = ladder.climb(step, highest, start=start, step=step)
    changes = {} if value is None else {"data.max_length": value}
    most = f"{highest} tokens are the most that the model has positions for."
    return _answer(planner, "length", value, changes, ladder, most)


def largest_model(
    recipe: Recipe,
    device: Device | None = None,
    *,
    budget: int = MODEL_BUDGET,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> Largest:
    """Find the model of the catalogue with the most parameters that surely fits with these settings.

    Models are halved into by size; then larger ones are tried until several in a row do not fit, because memory does
    not follow the number of parameters alone.

    Args:
        recipe, device, progress, cancel: As for ``largest_batch``.
        budget: Most models to estimate.

    Raises:
        RecipeError, Cancelled: As ``largest_batch``.
    """
    planner = Planner(
        recipe.with_changes({"model.config": None, "model.revision": None}), device, None, progress, cancel
    )
    rows = sorted(catalogue(), key=lambda row: row.num_parameters)
    search = _Models(planner, rows, budget)
    place = search.run()
    value = None if place is None else rows[place].name
    changes = {} if value is None else {"model.name_or_path": value}
    tried = tuple(search.tried[index] for index in sorted(search.tried))
    return Largest(
        what="model",
        device_name=planner.device.name,
        capacity_bytes=planner.device.capacity_bytes,
        value=value,
        changes=changes,
        limit=search.limit(place),
        tried=tried,
        num_estimates=planner.num_estimates,
    )


class _Ladder:
    """Finds the largest number that fits, between one that does and one that does not."""

    def __init__(self, planner: Planner, changes: Callable[[int], dict[str, Any]], what: str) -> None:
        self._planner, self._changes, self._what = planner, changes, what
        self.estimates: dict[int, Estimate] = {}

    def climb(self, lowest: int, highest: int, *, start: int, step: int = 1) -> int | None:
        """Return the largest multiple of ``step`` that fits, or None.

        Memory grows almost linearly, so that a line through two values lands near the limit; every other guess halves
        what is left, which bounds their number.
        """
        low, high = None, None
        value = start
        for turn in range(MAX_TRIES):
            if self._fits(value):
                low = value
                if value >= highest or (high is not None and high - low <= step):
                    return low
            else:
                high = value
                if value <= lowest:
                    return None
                if low is not None and high - low <= step:
                    return low
            value = self._guess(low, high, lowest, highest, step, by_line=turn % 2 == 0)
        return low

    def _guess(self, low: int | None, high: int | None, lowest: int, highest: int, step: int, *, by_line: bool) -> int:
        if high is None:
            assert low is not None
            guess = self._by_line(low * 2) if by_line else low * 2
            return min(highest, max(low + step, guess // step * step))
        floor = low if low is not None else lowest - step
        middle = (floor + high) // 2
        guess = self._by_line(middle) if by_line else middle
        return min(high - step, max(floor + step, guess // step * step))

    def _by_line(self, otherwise: int) -> int:
        """Return where a line through the two values nearest to the limit meets the capacity."""
        capacity = self._planner.device.capacity_bytes
        known = sorted((abs(item.memory.interval_bytes[1] - capacity), value) for value, item in self.estimates.items())
        if len(known) < 2:
            return otherwise
        one, two = known[0][1], known[1][1]
        first, second = (self.estimates[value].memory.interval_bytes[1] for value in (one, two))
        if first == second:
            return otherwise
        return int(one + (capacity - first) * (two - one) / (second - first))

    def _fits(self, value: int) -> bool:
        self._planner.tell(self._planner.num_estimates, None, f"{self._what} {value}")
        estimate = self._planner.require(self._changes(value))
        self.estimates[value] = estimate
        return estimate.memory.verdict == "fits"


class _Models:
    """Finds the largest model in a list ordered by size."""

    def __init__(self, planner: Planner, rows: list[CatalogueRow], budget: int) -> None:
        self.planner, self.rows, self.budget = planner, rows, budget
        self.tried: dict[int, Tried] = {}
        self.unknown: set[int] = set()

    def run(self) -> int | None:
        low, high = -1, len(self.rows)
        while high - low > 1 and self._can_go_on():
            middle = (low + high) // 2
            if self._fits(middle):
                low = middle
            else:
                high = middle
        best, misses, place = low, 0, low + 1
        while place < len(self.rows) and misses < MISSES and self._can_go_on():
            if self._fits(place):
                best, misses = place, 0
            else:
                misses += place not in self.unknown
            place += 1
        return best if best >= 0 else None

    def limit(self, place: int | None) -> str:
        """Return why no larger model was taken."""
        larger = [self.tried[index] for index in sorted(self.tried) if index > (-1 if place is None else place)]
        if not larger:
            return "The catalogue has no larger model."
        capacity = format_bytes(self.planner.device.capacity_bytes)
        return f"{larger[0].value} would need {format_bytes(larger[0].process_bytes)} of {capacity}."

    def _can_go_on(self) -> bool:
        return self.planner.num_estimates < self.budget

    def _fits(self, place: int) -> bool:
        if place in self.tried:
            return self.tried[place].verdict == "fits"
        name = self.rows[place].name
        self.planner.tell(self.planner.num_estimates, self.budget, name)
        try:
            estimate = self.planner.require({"model.name_or_path": name})
        except (RecipeError, ModelError, EstimateError):
            self.unknown.add(place)
            return False
        self.tried[place] = Tried(name, estimate.memory.process_bytes, estimate.time.step_s, estimate.memory.verdict)
        return estimate.memory.verdict == "fits"


def _answer(
    planner: Planner, what: str, value: int | None, changes: dict[str, Any], ladder: _Ladder, most: str
) -> Largest:
    tried = [
        Tried(number, item.memory.process_bytes, item.time.step_s, item.memory.verdict)
        for number, item in sorted(ladder.estimates.items())
    ]
    above = [number for number, item in ladder.estimates.items() if item.memory.verdict != "fits"]
    limit = most
    if above:
        first = min(above)
        memory = ladder.estimates[first].memory
        limit = (
            f"{first} would need {format_bytes(memory.process_bytes)} (up to {format_bytes(memory.interval_bytes[1])}) "
            f"of {format_bytes(memory.capacity_bytes)}, with the peak in {memory.peak_phase}."
        )
    return Largest(
        what=what,
        device_name=planner.device.name,
        capacity_bytes=planner.device.capacity_bytes,
        value=value,
        changes=changes,
        limit=limit,
        tried=tuple(tried),
        num_estimates=planner.num_estimates,
    )
