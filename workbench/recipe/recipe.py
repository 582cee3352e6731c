"""One Recipe says everything about a run: frozen, validated, documented. No other list of options exists."""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from ..errors import Problem, RecipeError
from . import parts


class Recipe(parts.Part):
    """All settings of a fine-tuning run. ``Recipe()`` is a good LoRA run of the built-in model and data.

    Example:
        >>> recipe = Recipe().with_changes({"training.learning_rate": 1e-4})
        >>> recipe.training.learning_rate
        0.0001
    """

    model: parts.ModelPart = parts.ModelPart()
    data: parts.DataPart = parts.DataPart()
    adapter: parts.AdapterPart = parts.AdapterPart()
    quantization: parts.QuantizationPart = parts.QuantizationPart()
    training: parts.TrainingPart = parts.TrainingPart()
    phases: parts.PhasesPart = parts.PhasesPart()
    pruning: parts.PruningPart = parts.PruningPart()
    tasks: parts.TasksPart = parts.TasksPart()
    evaluation: parts.EvaluationPart = parts.EvaluationPart()
    hardware: parts.HardwarePart = parts.HardwarePart()
    sharding: parts.ShardingPart = parts.ShardingPart()
    cost: parts.CostPart = parts.CostPart()
    policies: parts.PoliciesPart = parts.PoliciesPart()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Build a Recipe from nested plain values.

        Raises:
            RecipeError: With one problem per wrong field, all at once.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError(_problems_of(error)) from None

    @classmethod
    def from_yaml(cls, source: str | Path) -> Recipe:
        """Read a Recipe from a YAML file (a path) or from YAML text (a string with a newline or a colon).

        Raises:
            RecipeError: The file is missing or not YAML, or fields are wrong (all of them are listed).
        """
        is_text = isinstance(source, str) and ("\n" in source or ": " in source or source.strip() in ("", "{}"))
        if is_text:
            text, name = str(source), "the text"
        else:
            try:
                text, name = Path(source).read_text(encoding="utf-8"), str(source)
            except (OSError, UnicodeDecodeError) as error:
                raise _unreadable(f"{source} cannot be read ({error}). Give a YAML file.") from None
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            where = getattr(error, "problem_mark", None)
            line = f", line {where.line + 1}" if where else ""
            raise _unreadable(f"{name}{line} is not YAML: {getattr(error, 'problem', error)}.") from None
        if values is None:
            values = {}
        if not isinstance(values, dict):
            kind = type(values).__name__
            raise _unreadable(f"{name} holds a {kind}; a Recipe is groups of fields, like model: {{...}}.")
        return cls.from_dict(values)

    def to_dict(self, *, only_changed: bool = False) -> dict[str, Any]:
        """Return nested plain values; with ``only_changed`` only what differs from the defaults."""
        return self.model_dump(mode="json", exclude_defaults=only_changed)

    def to_yaml(self, *, only_changed: bool = False) -> str:
        """Return YAML that ``from_yaml`` reads back to an equal Recipe."""
        return yaml.safe_dump(self.to_dict(only_changed=only_changed), sort_keys=False, allow_unicode=True)

    def get(self, path: str) -> Any:
        """Return the value of a dotted field, e.g. ``"adapter.r"``.

        Raises:
            RecipeError: No such field; the nearest names are listed.
        """
        return getattr(getattr(self, field_info(path).group), field_info(path).name)

    def with_changes(self, changes: Mapping[str, Any]) -> Recipe:
        """Return a new Recipe with dotted fields changed; text values are read as YAML would read them.

        Raises:
            RecipeError: Unknown fields or wrong values, all at once.
        """
        values = self.model_dump()
        problems: list[Problem] = []
        for path, value in changes.items():
            try:
                info = field_info(path)
            except RecipeError as error:
                problems.extend(error.problems)
                continue
            values[info.group][info.name] = value
        try:
            changed = type(self).model_validate(values)
        except ValidationError as error:
            problems.extend(_problems_of(error))
        if problems:
            raise RecipeError(problems)
        return changed

    def diff(self, other: Recipe) -> dict[str, tuple[Any, Any]]:
        """Return ``{field: (mine, theirs)}`` for every field that differs."""
        pairs = ((info.path, (self.get(info.path), other.get(info.path))) for info in iter_fields())
        return {path: pair for path, pair in pairs if pair[0] != pair[1]}

    def digest(self) -> str:
        """Return 12 hex digits that change when any field changes."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


_BOOL_WORDS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """What the panel, the CLI and the docs need to know of one field.

    Attributes:
        path: ``"group.name"``.
        type_name: ``"str"``, ``"int"``, ``"float"``, ``"bool"``, ``"choice"``, ``"list"`` or ``"dict"`` (JSON).
        choices: Allowed values of a ``choice`` (or of the items of a ``list``); empty otherwise.
        optional: Whether None is allowed.
        minimum, maximum: Inclusive limits of numbers, or None.
        show: ``"main"``, ``"more"`` or ``"hidden"``: where the panel shows the field.
        toggle: Whether the panel shows the field's effect on memory and time beside it.
        item_type: Of the items of a ``list``: ``"str"``, ``"int"`` or ``"float"``; empty otherwise.
        tries: Values of a toggle whose effect is shown; empty takes the other choices, or half and double of a number.
    """

    path: str
    group: str
    name: str
    type_name: str
    default: Any
    doc: str
    label: str
    choices: tuple[Any, ...] = ()
    optional: bool = False
    minimum: float | None = None
    maximum: float | None = None
    show: str = "more"
    toggle: bool = False
    tries: tuple[Any, ...] = ()
    item_type: str = ""

    def parse(self, text: str) -> Any:
        """Return the value that a person's text means for this field; the Recipe judges whether it is allowed."""
        stripped = text.strip()
        if self.optional and stripped.lower() in ("", "none", "null"):
            return None
        if self.type_name == "bool":
            return _BOOL_WORDS.get(stripped.lower(), stripped)
        if self.type_name == "list":
            items = [item.strip().strip("'\"") for item in stripped.strip("[]()").split(",") if item.strip()]
            return stripped if self.default == "all-linear" and items == ["all-linear"] else items
        if self.type_name == "dict":
            try:
                return json.loads(stripped)
            except ValueError:
                return stripped
        if self.type_name in ("int", "float"):
            try:
                return int(stripped) if self.type_name == "int" else float(stripped)
            except ValueError:
                return stripped
        return stripped


def iter_fields() -> Iterator[FieldInfo]:
    """Yield every field of the Recipe, in order of the groups."""
    yield from _FIELDS.values()


def field_info(path: str) -> FieldInfo:
    """Return the FieldInfo of ``"group.name"``.

    Raises:
        RecipeError: No such field; the message lists the nearest names.
    """
    found = _FIELDS.get(path)
    if found is None:
        import difflib

        name = path.rsplit(".", 1)[-1]
        near = [info.path for info in _FIELDS.values() if info.name == name]
        near = near or difflib.get_close_matches(path, _FIELDS, n=3, cutoff=0.7)
        hint = f" Did you mean {' or '.join(near)}?" if near else f" Groups: {', '.join(Recipe.model_fields)}."
        raise RecipeError([Problem(path, f"no such field.{hint}")])
    return found


def _unreadable(message: str) -> RecipeError:
    return RecipeError([Problem("recipe", message)])


def _describe_field(group: str, name: str, info: Any) -> FieldInfo:
    annotation, optional, choices, item_type = info.annotation, False, (), ""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [item for item in typing.get_args(annotation) if item is not type(None)]
        optional = len(inner) < len(typing.get_args(annotation))
        annotation = inner[-1]
    origin = typing.get_origin(annotation)
    if origin is Literal:
        type_name, choices = "choice", typing.get_args(annotation)
    elif origin is tuple:
        type_name = "list"
        item = typing.get_args(annotation)[0]
        choices = typing.get_args(item) if typing.get_origin(item) is Literal else ()
        item_type = "str" if choices else item.__name__
    else:
        type_name = (origin or annotation).__name__
    limits = {type(limit).__name__: limit for limit in info.metadata}
    minimum = getattr(limits.get("Ge"), "ge", getattr(limits.get("Gt"), "gt", None))
    maximum = getattr(limits.get("Le"), "le", getattr(limits.get("Lt"), "lt", None))
    extra = info.json_schema_extra or {}
    return FieldInfo(
        path=f"{group}.{name}",
        group=group,
        name=name,
        type_name=type_name,
        default=None if info.default is PydanticUndefined else info.default,
        doc=" ".join((info.description or "").split()),
        label=extra.get("label", name),
        choices=choices,
        optional=optional,
        minimum=minimum,
        maximum=maximum,
        show=extra.get("show", "more"),
        toggle=bool(extra.get("toggle", False)),
        tries=tuple(extra.get("tries", ())),
        item_type=item_type,
    )


_FIELDS: dict[str, FieldInfo] = {
    f"{group}.{name}": _describe_field(group, name, info)
    for group, part in Recipe.model_fields.items()
    for name, info in typing.cast(Any, part.annotation).model_fields.items()
}


_LISTS = {"str": "a list of names", "int": "a list of whole numbers", "float": "a list of numbers"}


def _problems_of(error: ValidationError) -> list[Problem]:
    """Turn pydantic's list into one sentence per field: what was seen, what is allowed."""
    problems: dict[str, Problem] = {}
    for item in error.errors():
        location = [str(part) for part in item["loc"]]
        path = ".".join(location[:2])
        if path in problems:  # A union reports each of its branches; the first is enough.
            continue
        if item["type"] == "extra_forbidden":
            known = _FIELDS.get(path)
            if known is None:
                problems[path] = _unknown(location)
                continue
        problems[path] = Problem(path, _sentence(path, item))
    return list(problems.values())


def _unknown(location: list[str]) -> Problem:
    path = ".".join(location[:2])
    if len(location) == 1 or location[0] not in Recipe.model_fields:
        return Problem(path, f"no such group. Groups: {', '.join(Recipe.model_fields)}.")
    try:
        field_info(path)
    except RecipeError as error:
        return error.problems[0]
    return Problem(path, "no such field.")


def _sentence(path: str, item: Any) -> str:
    seen = item["input"]
    known = _FIELDS.get(path)
    if known is None:
        return f"{seen!r} is not a group of fields. Write fields below it, for example {path}: {{...}}."
    if known.choices:
        allowed = "one of " + ", ".join(map(str, known.choices))
    elif known.minimum is not None or known.maximum is not None:
        kind = {"int": "a whole number", "float": "a number"}.get(known.type_name, known.type_name)
        low = "" if known.minimum is None else f" from {_number(known.minimum)}"
        high = "" if known.maximum is None else f" up to {_number(known.maximum)}"
        allowed = kind + low + high
    else:
        words = {"bool": "true or false", "str": "text, not empty", "list": _LISTS.get(known.item_type, "a list")}
        allowed = words.get(known.type_name, known.type_name)
    if known.optional:
        allowed += ", or nothing"
    return f"{seen!r} is not allowed; allowed is {allowed}. The default is {known.default!r}."


def _number(value: float) -> str:
    """Return a limit as a person writes it: 1048576, not 1.04858e+06."""
    return str(int(value)) if value == int(value) else f"{value:g}"
