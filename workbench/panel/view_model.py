"""What the panel knows, as plain data: the Recipe, what was refused, undo, presets, YAML. No widgets.

The views ask and change this; it tells them what changed. Callbacks of widgets may run in several threads
(ipykernel 7 runs them in a subshell beside the cells), so every change happens under one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import Problem, RecipeError
from ..recipe import PRESETS, FieldInfo, Recipe, TargetFacts, field_info, find_problems, iter_fields, preset
from .texts import Say

MAX_UNDO = 100

# Fields that decide which tokens the run sees; a change of any other leaves a preview and its lengths valid.
# The seed is one: it draws the held-out rows and the order of packing.
_DATA_FIELDS = frozenset(
    {"model.name_or_path", "model.revision", "model.trust_remote_code", "training.seed", "evaluation.split"}
    | {"evaluation.max_rows"}
    | {info.path for info in iter_fields() if info.group == "data"}
) - {"data.padding", "data.group_by_length", "data.sampling", "data.dataloader_num_workers", "data.num_proc"}


@dataclass(frozen=True, slots=True)
class Change:
    """What a listener is told: the fields whose value is another now, and why (``"edit"``, ``"undo"``, ...)."""

    fields: frozenset[str]
    reason: str


Listener = Callable[[Change], None]


class PanelModel:
    """The state behind a panel.

    A value that the Recipe refuses is kept beside it as a problem, so that nothing a person typed is lost
    and the last valid Recipe stays what is estimated.
    """

    def __init__(self, recipe: Recipe | None = None, *, say: Say | None = None) -> None:
        self.say = say or Say()
        self._lock = threading.RLock()
        self._recipe = recipe or Recipe()
        self._past: list[Recipe] = []
        self._future: list[Recipe] = []
        self._refused: dict[str, tuple[Any, Problem]] = {}
        self._facts: TargetFacts | None = None
        self._device_problem: Problem | None = None
        self._listeners: list[Listener] = []

    @property
    def recipe(self) -> Recipe:
        """The last valid Recipe."""
        return self._recipe

    def listen(self, listener: Listener) -> None:
        """Call ``listener(change)`` after every change."""
        self._listeners.append(listener)

    # -- changes ---------------------------------------------------------------------------------------------------

    def set_field(self, path: str, value: Any) -> bool:
        """Set one field; return whether the Recipe took it. A refused value is kept as a problem."""
        return not self.set_fields({path: value})

    def set_fields(self, changes: Mapping[str, Any], reason: str = "edit") -> tuple[Problem, ...]:
        """Set several fields at once: all of them, or none when the Recipe refuses one. Returns the problems."""
        with self._lock:
            try:
                changed = self._recipe.with_changes(changes)
            except RecipeError as error:
                for problem in error.problems:
                    if problem.field in changes:
                        value = changes[problem.field]
                        self._refused[problem.field] = (value, self._with_fix(problem, value))
                self._tell(Change(frozenset(changes), "refused"))
                return error.problems
            cleared = [path for path in changes if self._refused.pop(path, None)]
            self._commit(changed, reason, also=cleared)
            return ()

    def apply_preset(self, name: str) -> None:
        """Take the values of a preset; the chosen model, data and hardware stay.

        Raises:
            RecipeError: No such preset.
        """
        with self._lock:
            kept = ("model.name_or_path", "model.config", "model.revision", "data.name_or_path", "data.config_name")
            mine = {path: self._recipe.get(path) for path in kept}
            mine |= {info.path: self._recipe.get(info.path) for info in iter_fields() if info.group == "hardware"}
            self._replace(preset(name).with_changes(mine), "preset")

    def apply_yaml(self, text: str) -> tuple[Problem, ...]:
        """Take a whole Recipe from YAML; on any problem nothing changes and the problems are returned."""
        try:
            recipe = Recipe.from_yaml(text if "\n" in text else text + "\n")
        except RecipeError as error:
            return error.problems
        with self._lock:
            self._replace(recipe, "yaml")
        return ()

    def take(self, recipe: Recipe, reason: str) -> None:
        """Take a whole Recipe, e.g. that of an earlier run; undo brings the old one back."""
        with self._lock:
            self._replace(recipe, reason)

    def apply_fix(self, problem: Problem) -> tuple[Problem, ...]:
        """Make the change that a problem proposes."""
        return self.set_fields(dict(problem.fix), "fix")

    def undo(self) -> bool:
        """Go back one change; return whether there was one."""
        return self._travel(self._past, self._future, "undo")

    def redo(self) -> bool:
        """Take back the last undo; return whether there was one."""
        return self._travel(self._future, self._past, "redo")

    # -- questions -------------------------------------------------------------------------------------------------

    @property
    def can_undo(self) -> bool:
        """Whether ``undo`` would change something."""
        return bool(self._past)

    @property
    def can_redo(self) -> bool:
        """Whether ``redo`` would change something."""
        return bool(self._future)

    def refused_value(self, path: str) -> Any:
        """Return what a person entered that the Recipe refused, or None."""
        entry = self._refused.get(path)
        return entry[0] if entry else None

    def is_refused(self, path: str) -> bool:
        """Whether the field shows a value that the Recipe refused."""
        return path in self._refused

    def set_target(self, facts: TargetFacts | None, problem: Problem | None = None) -> None:
        """Tell which device the rules judge by, or why it could not be found."""
        with self._lock:
            before = self.problems()
            self._facts, self._device_problem = facts, problem
            if self.problems() != before:
                self._tell(Change(frozenset(), "target"))

    def problems(self) -> tuple[Problem, ...]:
        """Return everything wrong: refused values first, then rules across fields, then the device."""
        refused = [problem for _, problem in self._refused.values()]
        device = [self._device_problem] if self._device_problem else []
        return (*refused, *find_problems(self._recipe, self._facts), *device)

    def changed_fields(self) -> dict[str, tuple[Any, Any]]:
        """Return ``{field: (default, mine)}`` for what differs from a plain Recipe."""
        return Recipe().diff(self._recipe)

    def yaml_text(self, *, only_changed: bool = False) -> str:
        """Return the Recipe as YAML."""
        return self._recipe.to_yaml(only_changed=only_changed)

    def preset_names(self) -> list[tuple[str, str]]:
        """Return ``(label, name)`` of the presets."""
        return [(f"{name}: {text}", name) for name, (text, _) in PRESETS.items()]

    def data_key(self) -> tuple[Any, ...]:
        """Return what the tokens depend on: equal keys mean the same prepared data."""
        return tuple(repr(self._recipe.get(path)) for path in sorted(_DATA_FIELDS))

    def undo_text(self) -> str:
        """Return what ``undo`` would change, e.g. ``"Undo: training.max_steps 40 → -1"``."""
        return f"Undo: {describe_changes(self._recipe.diff(self._past[-1]))}" if self._past else "Nothing to undo"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _replace(self, recipe: Recipe, reason: str) -> None:
        cleared = list(self._refused)
        self._refused.clear()
        self._commit(recipe, reason, also=cleared)

    def _commit(self, recipe: Recipe, reason: str, also: Iterable[str] = ()) -> None:
        differing = frozenset(self._recipe.diff(recipe))
        if differing:
            self._past.append(self._recipe)
            del self._past[:-MAX_UNDO]
            self._future.clear()
            self._recipe = recipe
        if differing or also:
            self._tell(Change(differing | frozenset(also), reason))

    def _travel(self, source: list[Recipe], target: list[Recipe], reason: str) -> bool:
        with self._lock:
            if not source:
                return False
            target.append(self._recipe)
            recipe = source.pop()
            fields = frozenset(self._recipe.diff(recipe)) | frozenset(self._refused)
            self._refused.clear()
            self._recipe = recipe
            self._tell(Change(fields, reason))
            return True

    def _with_fix(self, problem: Problem, value: Any) -> Problem:
        if problem.fix:
            return problem
        fix = nearest_allowed(field_info(problem.field), value, self._recipe.get(problem.field))
        return Problem(problem.field, problem.message, ((problem.field, fix),))

    def _tell(self, change: Change) -> None:
        for listener in list(self._listeners):
            listener(change)


def nearest_allowed(info: FieldInfo, value: Any, current: Any) -> Any:
    """Return the allowed value a person most likely meant: a number is moved into its limits, else ``current``."""
    if info.type_name in ("int", "float") and isinstance(value, int | float) and not isinstance(value, bool):
        clamped = value
        if info.minimum is not None:
            clamped = max(clamped, info.minimum)
        if info.maximum is not None:
            clamped = min(clamped, info.maximum)
        clamped = int(clamped) if info.type_name == "int" else clamped
        try:
            Recipe().with_changes({info.path: clamped})
        except RecipeError:
            return current
        return clamped
    return current


def describe_changes(changes: Mapping[str, tuple[Any, Any]], limit: int = 2) -> str:
    """Return ``{field: (from, to)}`` as text; more than ``limit`` fields are counted only."""
    shown = [f"{path} {format_field(a)} → {format_field(b)}" for path, (a, b) in list(changes.items())[:limit]]
    more = len(changes) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def format_field(value: Any) -> str:
    """Return a field's value as a person writes it; what ``FieldInfo.parse`` reads back."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        if value and (abs(value) < 1e-2 or abs(value) >= 1e6):
            mantissa, exponent = f"{value:e}".split("e")
            mantissa = mantissa.rstrip("0").rstrip(".")
            text = f"{mantissa}e{int(exponent)}"
            return text if float(text) == value else repr(value)
        return repr(int(value)) if value == int(value) else repr(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        import json

        return json.dumps(value)
    return str(value)
