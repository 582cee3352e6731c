"""``workbench plan``: what every toggle would change, and what makes the run fit."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from .arguments import ProgressLine, read_recipe
from .estimate import add_target_arguments, data_shape


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("plan", help="effect of every toggle; settings that fit", description=__doc__)
    add_target_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan."""
    recipe = read_recipe(options)
    from ..hardware import target_device
    from ..plan import plan_run
    from ..report.tables import render_plan

    progress = ProgressLine(options)
    device = target_device(recipe, options.device)
    plan = plan_run(recipe, device, shape=data_shape(recipe, options.with_data, progress), progress=progress)
    progress.clear()
    print(json.dumps(dataclasses.asdict(plan), default=str) if options.json else render_plan(plan))
    return 0
