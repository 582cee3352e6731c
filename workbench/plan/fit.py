"""make_fit: the one change of settings that makes a run fit, for one click."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import WorkbenchError
from ..estimate import BatchShape
from ..events import Cancel, ProgressCallback
from ..hardware import Device
from ..recipe import Recipe
from ..units import format_bytes
from .plan import PlanOption, SettingsFront
from .planner import Planner, option_of
from .search import DEFAULT_BUDGET, NOTABLE, find_settings
from .space import SPLIT_FIELDS, Freedom


class NothingFitsError(WorkbenchError):
    """No settings of the plan fit; ``front`` is what was searched."""

    def __init__(self, front: SettingsFront) -> None:
        self.front = front
        kept = f" Kept as you set them: {', '.join(front.pinned)}." if front.pinned else ""
        super().__init__(
            f"None of {front.num_estimates} settings fits on {front.device_name} "
            f"({format_bytes(front.capacity_bytes)}) with {front.effective_batch_size} samples per step.{kept} "
            "Ask for the largest length or model that fits, or for the devices that it fits on."
        )


def make_fit(
    recipe: Recipe,
    device: Device | None = None,
    *,
    shape: BatchShape | None = None,
    pinned: Collection[str] | None = None,
    budget: int = DEFAULT_BUDGET,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> PlanOption:
    """Return the fastest settings that surely fit, alter least and change no more than is needed.

    First only what learns the same is tried, then number formats; effective batch and method stay.

    Args:
        recipe: The settings that do not fit.
        device, shape, pinned, progress, cancel: As for ``find_settings``.
        budget: Most settings to estimate in each of the two searches.

    Raises:
        NothingFitsError: No settings were found; the message says what could be tried.
        RecipeError: The recipe itself is wrong.
        ModelError: The model is unknown.
        EstimateError: The run cannot be traced.
        Cancelled: The user cancelled.
    """
    planner = Planner(recipe, device, shape, progress, cancel)
    fallback: PlanOption | None = None
    freedoms: tuple[Freedom, ...] = ("nothing", "numerics")
    for freedom in freedoms:
        front = find_settings(
            recipe, planner.device, shape=planner.shape, pinned=pinned, freedom=freedom, budget=budget,
            progress=progress, cancel=cancel,
        )  # fmt: skip
        if front.best is not None and front.best.verdict == "fits":
            return _without_needless(front.best, planner)
        fallback = fallback or front.best
    if fallback is None:
        raise NothingFitsError(front)
    return fallback


def _without_needless(option: PlanOption, planner: Planner) -> PlanOption:
    """Take back each change without which the run fits as surely and is no slower."""
    for group in _groups(option.changes):
        fewer = {path: value for path, value in option.changes.items() if path not in group}
        estimate = planner.estimate(fewer)
        if estimate is None or estimate.memory.verdict != option.verdict:
            continue
        if estimate.time.step_s <= option.step_s * (1 + NOTABLE):
            option = option_of(fewer, estimate, tuple(option.alters))
    return option


def _groups(changes: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the fields that are taken back together, those that alter nothing first."""
    split = tuple(path for path in SPLIT_FIELDS if path in changes)
    singles = [(path,) for path in changes if path not in SPLIT_FIELDS and not path.startswith("quantization.")]
    return [*singles, *([split] if split else [])]
