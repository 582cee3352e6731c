"""Which device a run needs: the same settings on every device of the table."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import EstimateError, ModelError, RecipeError
from ..estimate import BatchShape
from ..events import Cancel, ProgressCallback
from ..hardware import Device, device_names, find_device
from ..recipe import Recipe
from .plan import DeviceChoice, DeviceTable, price_of
from .planner import Planner

_RANKS = {"fits": 0, "tight": 1, "does_not_fit": 2, None: 3}


def which_device(
    recipe: Recipe,
    *,
    names: Sequence[str] | None = None,
    shape: BatchShape | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> DeviceTable:
    """Estimate the run on every device of the table.

    The price is each device's own from the table; ``cost.price_per_hour_usd`` is the price of one device only.

    Args:
        recipe: The settings; what a device cannot do is said in its row.
        names: Devices to look at, such as ``"Tesla T4"`` or ``"Tesla T4:10GiB"``; None takes the whole table, with
            the capacity that ``hardware.emulate`` gives to one of them.
        shape: Batches, from ``shape_of_data``; None assumes that every sample fills ``max_length``.
        progress: Told about the stage ``"plan"``.
        cancel: Looked at in every estimate.

    Raises:
        DeviceError: A name is not in the table.
        ModelError: The model is unknown, or cannot be built for any device.
        Cancelled: The user cancelled.
    """
    wanted = _named(names or _with_own(recipe))
    plain = recipe.with_changes({"cost.price_per_hour_usd": None, "hardware.device": "auto"})
    planner = Planner(plain, next(iter(wanted.values())), shape, progress, cancel)
    choices = []
    error: ModelError | None = None
    for index, (name, device) in enumerate(wanted.items()):
        planner.tell(index, len(wanted), name)
        try:
            estimate = planner.require({"hardware.emulate": name}, device)
        except (RecipeError, EstimateError, ModelError) as problem:
            error = problem if isinstance(problem, ModelError) else error
            text = str(problem).splitlines()[0]
            choices.append(DeviceChoice(name, device.capacity_bytes, None, problem=text))
            continue
        memory, time = estimate.memory, estimate.time
        choices.append(
            DeviceChoice(
                name=name,
                capacity_bytes=device.capacity_bytes,
                verdict=memory.verdict,
                process_bytes=memory.process_bytes,
                step_s=time.step_s,
                tokens_per_s=time.tokens_per_s,
                total_s=time.total_s,
                cost_usd=time.cost_usd,
                cost_usd_per_1000_tokens=time.cost_usd_per_1000_tokens,
            )
        )
    if error is not None and all(choice.verdict is None for choice in choices):
        raise error
    ordered = sorted(choices, key=lambda choice: (_RANKS[choice.verdict], price_of(choice), choice.step_s))
    notes = ["Prices are dated offers of the device table; no price means that the table knows none."]
    if recipe.cost.price_per_hour_usd is not None:
        notes.append("cost.price_per_hour_usd is the price of one device and is not used in this comparison.")
    return DeviceTable(recipe.digest(), tuple(ordered), tuple(notes))


def _named(names: Sequence[str]) -> dict[str, Device]:
    """Return devices by their name in the table, with the capacity behind it where one was given."""
    found = {}
    for name in names:
        device = find_device(name)
        _, colon, capacity = name.partition(":")
        found[f"{device.name}{colon}{capacity}"] = device
    return found


def _with_own(recipe: Recipe) -> list[str]:
    """Return the table's names; of the device that the Recipe gives another capacity, the name with that capacity."""
    own = recipe.hardware.emulate or ""
    if ":" not in own:
        return device_names()
    name = find_device(own).name
    return [own if other == name else other for other in device_names()]
