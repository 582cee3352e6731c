"""Widgets generated from the Recipe's fields: a control, its documentation, its effect and its problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from ..errors import Problem
from ..recipe import FieldInfo, iter_fields
from .comms import answer_beside_cells
from .view_model import PanelModel, format_field

# Words for values whose bare name says little to a person.
CHOICE_WORDS: dict[tuple[str, Any], str] = {
    ("adapter.method", "lora"): "LoRA",
    ("adapter.method", "bottleneck"): "bottleneck",
    ("adapter.method", "none"): "none (train every weight)",
    ("training.mixed_precision", "no"): "none",
    ("data.train_on", "assistant"): "assistant's answers",
    ("data.train_on", "all"): "every token",
    ("hardware.device", "auto"): "auto",
    ("hardware.device", "cpu"): "CPU",
    ("hardware.device", "cuda"): "GPU (CUDA)",
}
PLACEHOLDERS: dict[str, str] = {
    "hardware.emulate": "this machine",
    "data.max_rows": "all",
    "cost.price_per_hour_usd": "from the device table",
    "evaluation.early_stopping_patience": "never",
}


def with_tooltip(kind: type, tooltip: str, **arguments: Any) -> Any:
    """Make a widget with a tooltip, which ipywidgets 7 calls ``description_tooltip``."""
    name = "tooltip" if kind.class_traits().get("tooltip") else "description_tooltip"
    return kind(**arguments, **({name: tooltip} if kind.class_traits().get(name) else {}))


def classed(widget: Any, *names: str) -> Any:
    """Add CSS classes and return the widget."""
    for name in names:
        widget.add_class(name)
    return widget


def set_hidden(widget: Any, hidden: bool) -> None:
    """Show or hide a widget by class."""
    (widget.add_class if hidden else widget.remove_class)("wb-hidden")


class FieldView:
    """One field of the Recipe on the panel.

    Attributes:
        info: The field.
        control: The ipywidgets control that edits it.
        box: What the panel shows: control, effect, problems.
    """

    def __init__(self, info: FieldInfo, model: PanelModel, suggestions: Sequence[str] | None = None) -> None:
        self.info = info
        self._model = model
        self.control = build_control(info, suggestions, model.say(info.label))
        self._picker = _build_picker(info, suggestions, self.control, model) if suggestions is not None else None
        self._effect = classed(widgets.HTML(), "wb-effect") if info.toggle else None
        self._is_stale = False
        self._problems: tuple[Problem, ...] = ()
        self._problem_box: Any = None
        self.box = classed(
            widgets.VBox(), "wb-field", f"wb-field-{info.type_name}", f"wb-f-{info.path.replace('.', '-')}"
        )
        self._arrange()
        self.refresh()
        self.control.observe(self._edited, names="value")

    def refresh(self) -> None:
        """Show the Recipe's value, unless the field shows one that was refused."""
        if self._model.is_refused(self.info.path):
            return
        value = to_control(self.info, self._model.recipe.get(self.info.path))
        if self.control.value != value:
            self.control.value = value

    def show_problems(self, problems: Sequence[Problem]) -> None:
        """Show problems under the control, each with a button that fixes it."""
        problems = tuple(problems)
        if problems == self._problems:
            return
        self._problems = problems
        (self.box.add_class if problems else self.box.remove_class)("wb-has-problem")
        self._problem_box = problem_box(problems, self._model.apply_fix) if problems else None
        self._arrange()
        if self._problem_box is not None:
            answer_beside_cells(self._problem_box)

    def set_effect(self, html: str) -> None:
        """Show what changing this field would do to memory and time (HTML, already escaped)."""
        if self._effect is not None and self._effect.value != html:
            self._effect.value = html

    def set_effect_stale(self, stale: bool) -> None:
        """Grey the effect while it belongs to earlier settings."""
        if self._effect is not None and stale != self._is_stale:
            self._is_stale = stale
            (self._effect.add_class if stale else self._effect.remove_class)("wb-stale")

    def set_suggestions(self, names: Sequence[str]) -> None:
        """Offer other names in the list; what is typed stays free."""
        if self._picker is not None:
            self.control.options = tuple(names)
            self._picker.options = _picker_options(names)

    def _arrange(self) -> None:
        first = self.control
        if self._picker is not None:
            first = getattr(self, "_row", None) or classed(widgets.HBox((self.control, self._picker)), "wb-combo")
            self._row = first
        children = (first, self._effect, self._problem_box)
        self.box.children = tuple(child for child in children if child is not None)

    def _edited(self, change: Any) -> None:
        value = from_control(self.info, change["new"])
        current = self._model.recipe.get(self.info.path)
        same = value == current or (isinstance(current, tuple) and value == list(current))
        if same and not self._model.is_refused(self.info.path):
            return
        self._model.set_field(self.info.path, value)


def build_control(info: FieldInfo, suggestions: Sequence[str] | None = None, label: str = "") -> Any:
    """Return the control for a field: a check box, a list, a number box or a text box."""
    common: dict[str, Any] = {"description": label or info.label}
    if info.type_name == "bool":
        return with_tooltip(widgets.Checkbox, info.doc, indent=False, **common)
    if info.type_name == "choice":
        options = [(CHOICE_WORDS.get((info.path, choice), str(choice)), choice) for choice in info.choices]
        return with_tooltip(widgets.Dropdown, info.doc, options=options, **common)
    if info.type_name == "int" and not info.optional:
        return with_tooltip(widgets.IntText, info.doc, **common)
    common["continuous_update"] = False
    common["placeholder"] = PLACEHOLDERS.get(info.path, "")
    if suggestions is not None:
        return with_tooltip(widgets.Combobox, info.doc, options=tuple(suggestions), ensure_option=False, **common)
    return with_tooltip(widgets.Text, info.doc, **common)


def to_control(info: FieldInfo, value: Any) -> Any:
    """Return a Recipe's value as its control holds it."""
    if info.type_name in ("bool", "choice") or (info.type_name == "int" and not info.optional):
        return value
    return format_field(value)


def from_control(info: FieldInfo, value: Any) -> Any:
    """Return what a control holds as the Recipe takes it."""
    return info.parse(value) if isinstance(value, str) and info.type_name != "choice" else value


def problem_box(problems: Sequence[Problem], fix: Callable[[Problem], Any], *, with_field: bool = False) -> Any:
    """Return a box with one line per problem and, where a fix is known, a button that makes it."""
    rows = []
    for problem in problems:
        name = f"<b>{escape(problem.field)}</b>: " if with_field else ""
        text = classed(widgets.HTML(f'<span role="alert">{name}{escape(problem.message)}</span>'), "wb-problem-text")
        row = [text]
        if problem.fix:
            button = classed(widgets.Button(description=describe_fix(problem)), "wb-button", "wb-fix")
            button.tooltip = "Make this change"
            button.on_click(lambda _, problem=problem: fix(problem))
            row.append(button)
        rows.append(classed(widgets.VBox(row), "wb-problem"))
    return classed(widgets.VBox(rows), "wb-problems")


def describe_fix(problem: Problem) -> str:
    """Return the words on a fix button, e.g. ``"Set data.padding to longest"``."""
    return "Set " + ", ".join(f"{path} to {format_field(value) or 'empty'}" for path, value in problem.fix)


def build_fields(model: PanelModel, suggestions: Mapping[str, Sequence[str]] | None = None) -> dict[str, FieldView]:
    """Return a view for every field that the Recipe marks as shown; hidden ones are edited as YAML."""
    names = suggestions or {}
    return {
        info.path: FieldView(info, model, names.get(info.path))
        for info in iter_fields()
        if info.show in ("main", "more")
    }


def _build_picker(info: FieldInfo, names: Sequence[str], control: Any, model: PanelModel) -> Any:
    """Return a small list beside a text box: browsers' own suggestions hide all that does not match what is typed."""
    picker = with_tooltip(
        widgets.Dropdown,
        model.say("Choose from known names: {label}", label=model.say(info.label)),
        options=_picker_options(names),
        description=model.say("Known: {label}", label=model.say(info.label)),
    )

    def picked(change: Any) -> None:
        if change["new"]:
            control.value = change["new"]
            picker.value = ""  # so that the same name can be picked again after typing

    picker.observe(picked, names="value")
    return classed(picker, "wb-picker")


def _picker_options(names: Sequence[str]) -> list[tuple[str, Any]]:
    return [("choose…", ""), *((name, name) for name in names)]
