"""``workbench plan``: what every toggle would change, what makes the run fit, the largest that fits, which device."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from ..recipe import Recipe, field_info, preset
from .arguments import ProgressLine, named_fields, read_recipe
from .estimate import add_target_arguments, data_shape

if TYPE_CHECKING:
    from ..plan import DeviceTable, Largest, SettingsFront
    from ..report.plan_tables import PlanTable


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser(
        "plan", help="effect of every toggle; settings, batch, model and device that fit", description=__doc__
    )
    add_target_arguments(parser)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--settings",
        action="store_true",
        help="instead: the settings that fit and that no others beat in memory and time, fastest first",
    )
    asked.add_argument(
        "--largest", choices=("batch", "length", "model"), help="instead: the largest batch, length or model that fits"
    )
    asked.add_argument("--which-device", action="store_true", help="instead: the run on every device of the table")
    asked.add_argument(
        "--layouts",
        type=int,
        metavar="N",
        help="instead: which layout for N devices? Memory, traffic and step time of each, side by side",
    )
    parser.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="FIELD",
        help="keep this field as it is; fields that the recipe or a flag sets are kept anyway",
    )
    parser.add_argument(
        "--free", action="append", default=[], metavar="FIELD", help="let the plan change a field that is set; or all"
    )
    parser.add_argument("--budget", type=int, default=None, metavar="N", help="most estimates of --settings")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan."""
    recipe = read_recipe(options)
    progress = ProgressLine(options)
    if options.layouts:
        return _print_layouts(options, recipe, progress)
    if options.settings or options.largest or options.which_device:
        from ..report.plan_tables import render_plan_table

        result, table = _answer(options, recipe, progress)
        progress.clear()
        print(json.dumps(dataclasses.asdict(result), default=str) if options.json else render_plan_table(table))
        return 0
    from ..hardware import target_device
    from ..plan import plan_run
    from ..report.tables import render_plan

    device = target_device(recipe, options.device)
    shape = data_shape(recipe, options.with_data, progress)
    plan = plan_run(recipe, device, shape=shape, pinned=pinned_fields(options, recipe), progress=progress)
    progress.clear()
    print(json.dumps(dataclasses.asdict(plan), default=str) if options.json else render_plan(plan))
    return 0


def pinned_fields(options: argparse.Namespace, recipe: Recipe) -> frozenset[str]:
    """Return the fields that the plan keeps: what the file or a flag sets and ``--pin``, without ``--free``.

    Raises:
        RecipeError: No such field.
    """
    from ..plan import explicit_fields

    named = {field_info(path).path for path in options.pin}
    if "all" in options.free:
        return frozenset(named)
    freed = {field_info(path).path for path in options.free}
    base = preset(options.preset) if options.preset else None
    return ((explicit_fields(recipe, base) | named_fields(options)) - freed) | named


def _answer(
    options: argparse.Namespace, recipe: Recipe, progress: ProgressLine
) -> tuple[SettingsFront | Largest | DeviceTable, PlanTable]:
    from .. import plan
    from ..hardware import target_device
    from ..plan.search import DEFAULT_BUDGET
    from ..report import plan_tables

    shape = data_shape(recipe, options.with_data, progress)
    if options.which_device:
        names = [options.device] if options.device else None
        devices = plan.which_device(recipe, names=names, shape=shape, progress=progress)
        return devices, plan_tables.devices_table(devices)
    device = target_device(recipe, options.device)
    if options.settings:
        front = plan.find_settings(
            recipe,
            device,
            shape=shape,
            pinned=pinned_fields(options, recipe),
            budget=options.budget or DEFAULT_BUDGET,
            progress=progress,
        )
        return front, plan_tables.front_table(front)
    if options.largest == "batch":
        largest = plan.largest_batch(recipe, device, shape=shape, progress=progress)
    elif options.largest == "length":
        largest = plan.largest_length(recipe, device, progress=progress)
    else:
        largest = plan.largest_model(recipe, device, progress=progress)
    return largest, plan_tables.largest_table(largest)


def _print_layouts(options: argparse.Namespace, recipe: Recipe, progress: ProgressLine) -> int:
    from ..estimate import estimate_layouts
    from ..hardware import target_device
    from ..report.layouts import render_layouts

    device = target_device(recipe, options.device)
    shape = data_shape(recipe, options.with_data, progress)
    table = estimate_layouts(recipe, device, num_devices=options.layouts, shape=shape, progress=progress)
    progress.clear()
    print(json.dumps(table.to_dict()) if options.json else render_layouts(table))
    return 0
