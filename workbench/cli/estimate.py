"""``workbench estimate``: memory and step time before anything is loaded."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ..recipe import Recipe
from .arguments import ProgressLine, add_recipe_arguments, read_recipe

if TYPE_CHECKING:
    from ..estimate.estimate import BatchShape


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("estimate", help="predict memory and step time", description=__doc__)
    add_target_arguments(parser)
    parser.add_argument("--timeline", action="store_true", help="with --json: also print the memory timeline")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="say who lives at the peak, what comes next, how it grows, and why more is reserved",
    )
    parser.set_defaults(run=run)


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the Recipe's arguments, ``--device``, ``--with-data`` and ``--json``."""
    add_recipe_arguments(parser)
    parser.add_argument("--device", help="name of a GPU in the device table, e.g. 'Tesla T4', or cpu")
    parser.add_argument(
        "--with-data", action="store_true", help="read the data set and use its lengths instead of max_length"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def data_shape(recipe: Recipe, wanted: bool, progress: ProgressLine) -> BatchShape | None:
    """Return the batch shape of the chosen data set, or None to assume every sample full."""
    if not wanted:
        return None
    from ..components.data import prepare_data
    from ..components.source import find_source, load_tokenizer
    from ..estimate import shape_of_data

    source = find_source(recipe, for_training=True, progress=progress)
    return shape_of_data(recipe, prepare_data(recipe, load_tokenizer(source), progress=progress))


def run(options: argparse.Namespace) -> int:
    """Print the estimate."""
    recipe = read_recipe(options)
    from ..estimate import estimate_run, explain_run, with_smallest_capacity
    from ..hardware import target_device
    from ..report.tables import render_estimate

    progress = ProgressLine(options)
    device = target_device(recipe, options.device)
    shape = data_shape(recipe, options.with_data, progress)
    predict = explain_run if options.explain else estimate_run
    estimate = predict(recipe, device, shape=shape, progress=progress)
    if not options.explain:  # An explanation has it.
        estimate = with_smallest_capacity(estimate, recipe, device, shape=shape)
    progress.clear()
    if options.json:
        print(json.dumps(estimate.to_dict(with_timeline=options.timeline)))
    else:
        print(render_estimate(estimate))
        if estimate.explanation is not None:
            from ..report.explanation import render_explanation

            print(f"\n{render_explanation(estimate)}")
    return 0
