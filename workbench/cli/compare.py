"""``workbench compare``: variants of one run side by side, estimated or also trained."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ..errors import Problem, RecipeError
from ..recipe import Recipe
from .arguments import ProgressLine, read_recipe
from .estimate import add_target_arguments, data_shape

if TYPE_CHECKING:
    from ..estimate import BatchShape


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("compare", help="estimate or run variants side by side", description=__doc__)
    add_target_arguments(parser)
    parser.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="FIELD=A,B,C",
        help="values of one field, e.g. --over adapter.r=8,16,64; may be repeated: every combination is a variant",
    )
    parser.add_argument(
        "--methods", action="store_true", help="compare full fine-tuning, LoRA, LoRA with checkpointing and QLoRA"
    )
    parser.add_argument("--train", action="store_true", help="also train every variant on this machine")
    parser.add_argument("--out", metavar="DIR", help="folder for the runs' folders; default: ./runs")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one row a variant."""
    recipe = read_recipe(options)
    choices = _choices(options.over)
    if not choices and not options.methods:
        raise RecipeError([Problem("compare", "give --over FIELD=A,B,C or --methods: what the variants differ in.")])
    from ..hardware import target_device
    from ..pipeline.comparing import METHODS, compare_recipes, variants_over
    from ..report.comparison import comparison_markdown, render_comparison

    variants = {"": {}} if not options.methods else METHODS
    if choices:
        over = variants_over(choices)
        variants = {
            ", ".join(name for name in (first, second) if name): {**one, **other}
            for first, one in variants.items()
            for second, other in over.items()
        }
    progress = ProgressLine(options)

    def shape(variant: Recipe) -> BatchShape | None:
        return data_shape(variant, options.with_data, progress)

    rows = compare_recipes(
        recipe,
        variants,
        target_device(recipe, options.device) if options.device else None,
        shape=shape,
        train=options.train,
        run_root=options.out,
        progress=progress,
    )
    progress.clear()
    values = [row.to_dict() for row in rows]
    if options.json:
        print(json.dumps(values))
    else:
        print(comparison_markdown(values) if options.markdown else render_comparison(values))
    return 0 if any(row.problem is None for row in rows) else 1


def _choices(texts: list[str]) -> dict[str, list[str]]:
    """Return ``{field: values}`` of ``--over`` arguments.

    Raises:
        RecipeError: One of them has no ``=`` or no value.
    """
    choices: dict[str, list[str]] = {}
    problems = []
    for text in texts:
        path, _, values = text.partition("=")
        found = [value.strip() for value in values.split(",") if value.strip()]
        if not found:
            problems.append(Problem(path, "--over takes FIELD=A,B,C, for example --over adapter.r=8,16,64."))
        choices[path.strip()] = found
    if problems:
        raise RecipeError(problems)
    return choices
