"""Arguments that several verbs share. The Recipe's flags are made from its fields: no second list of options."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..errors import Problem, RecipeError
from ..events import Progress
from ..recipe import PRESETS, Recipe, field_info, iter_fields, preset

_FIELD_PREFIX = "field:"


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the YAML file, ``--preset``, ``--set FIELD=VALUE`` and one flag per field, ``--group.name VALUE``."""
    parser.add_argument("recipe", nargs="?", help="YAML file with a Recipe; every field has a default")
    parser.add_argument("--preset", choices=list(PRESETS), help="start from a built-in preset")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change one field, e.g. --set training.learning_rate=1e-4; may be repeated",
    )
    group = parser.add_argument_group("fields of the Recipe")
    for info in iter_fields():
        allowed = f" One of: {', '.join(map(str, info.choices))}." if info.choices else ""
        text = f"{info.doc}{allowed} Default: {info.default!r}."
        group.add_argument(
            f"--{info.path}",
            dest=_FIELD_PREFIX + info.path,
            metavar=info.type_name.upper(),
            default=None,
            help=text.replace("%", "%%").replace("``", ""),
        )


def read_recipe(options: argparse.Namespace, base: Recipe | None = None) -> Recipe:
    """Return the Recipe of the YAML file or preset, with the flags' changes.

    Args:
        options: What was parsed.
        base: Takes the place of file and preset: the Recipe of a run that goes on.

    Raises:
        RecipeError: All that is wrong, at once.
    """
    if options.recipe and options.preset:
        raise RecipeError([Problem("recipe", "give a YAML file or --preset, not both.")])
    recipe = base
    if recipe is None:
        recipe = Recipe.from_yaml(_as_path(options.recipe)) if options.recipe else preset(options.preset or "lora")
    changes: dict[str, Any] = {}
    problems: list[Problem] = []
    for text in options.set:
        path, separator, value = text.partition("=")
        if not separator:
            problems.append(Problem(path, "--set takes FIELD=VALUE, for example --set training.learning_rate=1e-4."))
            continue
        try:
            changes[path.strip()] = field_info(path.strip()).parse(value)
        except RecipeError as error:
            problems.extend(error.problems)
    for name, value in vars(options).items():
        if name.startswith(_FIELD_PREFIX) and value is not None:
            path = name.removeprefix(_FIELD_PREFIX)
            changes[path] = field_info(path).parse(value)
    try:
        changed = recipe.with_changes(changes)
    except RecipeError as error:
        problems.extend(error.problems)
    if problems:
        raise RecipeError(problems)
    return changed


def named_fields(options: argparse.Namespace) -> frozenset[str]:
    """Return the fields that a flag sets, whatever the value; how a batch is split is not counted."""
    from ..plan.space import SPLIT_FIELDS

    named = {text.partition("=")[0].strip() for text in options.set}
    named |= {
        name.removeprefix(_FIELD_PREFIX)
        for name, value in vars(options).items()
        if name.startswith(_FIELD_PREFIX) and value is not None
    }
    return frozenset(named) - frozenset(SPLIT_FIELDS)


def _as_path(text: str) -> Any:
    from pathlib import Path

    return Path(text)


class ProgressLine:
    """Shows the latest Progress on one line of stderr; silent when stderr is no terminal or ``--json`` is given."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._shown = sys.stderr.isatty() and not getattr(options, "json", False)
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        """Take one Progress."""
        if not self._shown:
            return
        share = f" {progress.done / progress.total:4.0%}" if progress.total else ""
        line = f"{progress.stage}{share} {progress.message}"[:100]
        print("\r" + line.ljust(self._width), end="", file=sys.stderr, flush=True)
        self._width = len(line)

    def clear(self) -> None:
        """Remove the line."""
        if self._shown and self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)
            self._width = 0
