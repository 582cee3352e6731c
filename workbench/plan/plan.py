"""What a plan says. Plain data: no torch, so that panel, CLI and report read it for free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..estimate.estimate import Verdict


@dataclass(frozen=True)
class ToggleEffect:
    """What one change of one field would do, everything else kept.

    Attributes:
        field: Dotted path.
        value: The other value.
        memory_delta_bytes: Change of ``process_bytes``.
        step_delta_s: Change of ``step_s``.
        verdict: Whether the run would fit then.
    """

    field: str
    value: Any
    memory_delta_bytes: int
    step_delta_s: float
    verdict: Verdict


@dataclass(frozen=True)
class PlanOption:
    """Changes that make the run fit; samples per optimizer step stay the same.

    Attributes:
        changes: ``{field: value}``, to be given to ``Recipe.with_changes``.
        process_bytes: Predicted memory with them.
        step_s: Predicted step time with them.
        verdict: ``"fits"`` or ``"tight"``.
    """

    changes: Mapping[str, Any]
    process_bytes: int
    step_s: float
    verdict: Verdict


@dataclass(frozen=True)
class Plan:
    """Effects of every toggle, and ways to make the run fit.

    Attributes:
        recipe_digest: Of the recipe it is for.
        device_name: The device it is for.
        process_bytes: Predicted memory of the recipe as it is.
        capacity_bytes: What the device offers.
        step_s: Predicted step time of the recipe as it is.
        verdict: Of the recipe as it is.
        effects: One for every other value of every toggle that the rules allow.
        options: Fastest first; empty where the recipe fits already or nothing makes it fit.
    """

    recipe_digest: str
    device_name: str
    process_bytes: int
    capacity_bytes: int
    step_s: float
    verdict: Verdict
    effects: Sequence[ToggleEffect]
    options: Sequence[PlanOption]
