"""plan_run: the marginal effect of every toggle, and changes that make a run fit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..estimate import BatchShape
from ..events import Cancel, ProgressCallback
from ..hardware import Device
from ..recipe import FieldInfo, Recipe, iter_fields
from .plan import Plan, PlanOption, ToggleEffect, preference
from .planner import Planner
from .search import find_settings

# Options shown at most; the first ones are the least intrusive.
MAX_OPTIONS = 5
# Settings a plan looks at to make a run fit: it follows every change of a panel and must be quick. ``find_settings``
# looks further.
OPTION_BUDGET = 30


def plan_run(
    recipe: Recipe,
    device: Device | None = None,
    *,
    shape: BatchShape | None = None,
    pinned: Collection[str] | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> Plan:
    """Estimate every other value of every toggle, and search for changes that make the run fit.

    Args:
        recipe: The settings.
        device: The target; None takes the Recipe's.
        shape: Batches, from ``shape_of_data``; None assumes that every sample fills ``max_length``.
        pinned: Fields that the options leave alone; None leaves those alone that differ from a plain Recipe.
        progress: Told about the stage ``"plan"``.
        cancel: Looked at between estimates.

    Raises:
        RecipeError: The recipe itself is wrong; changes that the rules forbid are left out.
        ModelError: The model is unknown.
        EstimateError: The run cannot be traced.
        Cancelled: The user cancelled.
    """
    planner = Planner(recipe, device, shape, progress, cancel)
    base = planner.base()
    changes = [(info.path, value) for info in iter_fields() if info.toggle for value in other_values(info, recipe)]
    effects = []
    for index, (path, value) in enumerate(changes):
        planner.tell(index, len(changes), f"{path} = {value}")
        estimate = planner.estimate({path: value})
        if estimate is not None:
            effects.append(
                ToggleEffect(
                    field=path,
                    value=value,
                    memory_delta_bytes=estimate.memory.process_bytes - base.memory.process_bytes,
                    step_delta_s=estimate.time.step_s - base.time.step_s,
                    verdict=estimate.memory.verdict,
                )
            )
    options: list[PlanOption] = []
    if base.memory.verdict != "fits":
        options = _options(planner, pinned, progress, cancel)
    return Plan(
        recipe_digest=recipe.digest(),
        device_name=planner.device.name,
        process_bytes=base.memory.process_bytes,
        capacity_bytes=base.memory.capacity_bytes,
        step_s=base.time.step_s,
        verdict=base.memory.verdict,
        effects=tuple(effects),
        options=tuple(options),
    )


def other_values(info: FieldInfo, recipe: Recipe) -> list[Any]:
    """Return the values of a toggle worth trying: the other ones, those it names, or half and double of a number."""
    value = recipe.get(info.path)
    if info.tries:
        return [other for other in info.tries if other != value]
    if info.type_name == "bool":
        return [not value]
    if info.type_name == "choice":
        return [choice for choice in info.choices if choice != value]
    if info.type_name == "int" and value is not None:  # None: the field is off, and nothing says how far on
        low, high = info.minimum, info.maximum
        near = [value // 2, value * 2]
        return [item for item in near if (low is None or item >= low) and (high is None or item <= high)]
    return []


def _options(
    planner: Planner,
    pinned: Collection[str] | None,
    progress: ProgressCallback | None,
    cancel: Cancel | None,
) -> list[PlanOption]:
    front = find_settings(
        planner.recipe, planner.device, shape=planner.shape, pinned=pinned, budget=OPTION_BUDGET, progress=progress,
        cancel=cancel,
    )  # fmt: skip
    better = [option for option in front.options if option.changes]
    if front.current.verdict == "tight":
        better = [option for option in better if option.verdict == "fits"]
    return sorted(better, key=preference)[:MAX_OPTIONS]
