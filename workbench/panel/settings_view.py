"""Sections 1 and 2: the fields of the Recipe in cards, with presets, undo and a YAML view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from ..errors import Problem
from ..recipe import Recipe, iter_fields
from .comms import answer_beside_cells
from .fields import FieldView, classed, problem_box, set_hidden, with_tooltip
from .pieces import ErrorBox, Fold, button, card, subtitle
from .texts import Say
from .view_model import Change, PanelModel

GROUP_TITLES: dict[str, str] = {
    "model": "Model",
    "data": "Data",
    "adapter": "Adapter",
    "quantization": "Quantization",
    "training": "Training",
    "phases": "Phases",
    "pruning": "Pruning",
    "tasks": "Several tasks",
    "evaluation": "Evaluation",
    "hardware": "Hardware",
    "sharding": "Several devices",
    "cost": "Cost",
    "policies": "When something goes wrong",
}
SECTION_GROUPS: tuple[tuple[str, ...], tuple[str, ...]] = (
    ("model", "data", "hardware", "sharding"),
    ("adapter", "quantization", "training", "phases", "pruning", "tasks", "evaluation", "cost", "policies"),
)
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
MAX_FILES_SUGGESTED = 40


def suggest_data(folder: Path | None = None) -> list[str]:
    """Return the built-in data set and the data files in this folder and its ``data`` folder."""
    here = folder or Path.cwd()
    found = []
    for place in (here, here / "data"):
        try:
            files = sorted(path for path in place.iterdir() if path.suffix.lower() in DATA_SUFFIXES and path.is_file())
        except OSError:
            continue
        found += [str(path.relative_to(here)) for path in files]
    return ["python-docs", *found[:MAX_FILES_SUGGESTED]]


def main_card(number: int, fields: Mapping[str, FieldView], extra: Sequence[Any], say: Say | None = None) -> Any:
    """Return the card of section 1 (model, data, hardware) or 2 (method and toggles)."""
    say = say or Say()
    groups = SECTION_GROUPS[number - 1]
    infos = [info for info in iter_fields() if info.group in groups and info.path in fields]
    shown = [info for info in infos if info.show == "main"]
    switches = [fields[info.path].box for info in shown if info.type_name == "bool"]
    others = [fields[info.path].box for info in shown if info.type_name != "bool"]
    wide = ("wb-fields-wide",) if number == 1 else ()
    children: list[Any] = [classed(widgets.VBox(others), "wb-fields", *wide)]
    if switches:
        children.append(classed(widgets.VBox(switches), "wb-fields", "wb-switches"))
    folded: list[Any] = []
    for group in groups:
        more = [info for info in infos if info.group == group and info.show == "more"]
        if more:
            folded += [
                subtitle(say(GROUP_TITLES[group])),
                classed(widgets.VBox([fields[i.path].box for i in more]), "wb-fields"),
            ]
    titles = (
        (say("Model & data"), say("What learns, and from what.")),
        (say("Method & toggles"), say("What trains, and what saves memory.")),
    )
    label = (say("More on model, data and hardware"), say("More settings"))[number - 1]
    fold = Fold(label, folded, name=f"wb-more-{number}")
    return card(number, *titles[number - 1], (*children, fold.box, *extra), f"wb-card-{number}")


class Header:
    """Title, summary line, presets, undo and redo, YAML."""

    def __init__(self, model: PanelModel) -> None:
        self._model = model
        self._title = classed(widgets.HTML(), "wb-title")
        self._preset = with_tooltip(
            widgets.Dropdown,
            model.say("Take a preset's method; model, data and hardware stay"),
            options=[(model.say("choose…"), ""), *model.preset_names()],
            description=model.say("Preset"),
        )
        self._preset.observe(self._picked, names="value")
        self._undo = button(model.say("↶ Undo"), model.undo, "wb-undo")
        self._redo = button(model.say("↷ Redo"), model.redo, "wb-redo", tooltip=model.say("Take back the last undo"))
        self._yaml = YamlView(model)
        actions = (self._preset, self._undo, self._redo, self._yaml.button)
        row = classed(widgets.HBox((self._title, classed(widgets.HBox(actions), "wb-actions"))), "wb-header")
        self._problems = classed(widgets.VBox(), "wb-general-problems")
        self._shown_problems: tuple[Problem, ...] = ()
        self.box = classed(widgets.VBox((row, self._yaml.box, self._problems)), "wb-top")
        model.listen(self._changed)
        self._show()

    def show_problems(self, problems: Sequence[Problem]) -> None:
        """Show problems of fields that have no control in sight."""
        if tuple(problems) == self._shown_problems:
            return
        self._shown_problems = tuple(problems)
        box = problem_box(problems, self._model.apply_fix, with_field=True) if problems else None
        self._problems.children = (box,) if box is not None else ()
        if box is not None:
            answer_beside_cells(box)

    def _picked(self, change: Any) -> None:
        if change["new"]:
            self._model.apply_preset(change["new"])
            self._preset.value = ""

    def _changed(self, change: Change) -> None:
        self._show()

    def _show(self) -> None:
        from html import escape

        text = f'<div class="wb-brand">Workbench<small>{escape(summarise(self._model.recipe))}</small></div>'
        if self._title.value != text:
            self._title.value = text
        self._undo.disabled = not self._model.can_undo
        self._undo.tooltip = self._model.undo_text()
        self._redo.disabled = not self._model.can_redo


class YamlView:
    """The Recipe as YAML, to copy out and in. Text with mistakes stays in the box, and the Recipe as it was."""

    def __init__(self, model: PanelModel) -> None:
        self._model = model
        self.button = button(
            "YAML", self._toggle, "wb-yaml-button", tooltip=model.say("Show the Recipe as YAML, every field of it")
        )
        self.text = widgets.Textarea(description="", layout=widgets.Layout(width="100%"))
        self.text.rows = 16
        self._error = ErrorBox()
        actions = (
            button(
                model.say("Apply"),
                self.apply,
                "wb-primary",
                "wb-yaml-apply",
                tooltip=model.say("Take this text as the Recipe"),
            ),
            button(model.say("Show all fields"), lambda: self.fill(only_changed=False), "wb-yaml-all"),
            button(model.say("Only what differs"), lambda: self.fill(only_changed=True), "wb-yaml-changed"),
        )
        self.box = classed(
            widgets.VBox((self.text, self._error.box, classed(widgets.HBox(actions), "wb-bar-row"))),
            "wb-yaml",
            "wb-hidden",
        )
        self._is_open = False
        self._only_changed = False
        model.listen(self._changed)

    def fill(self, *, only_changed: bool) -> None:
        """Write the Recipe into the box; what was typed there is replaced."""
        self._only_changed = only_changed
        self.text.value = self._model.yaml_text(only_changed=only_changed)
        self._error.clear()

    def apply(self) -> None:
        """Take the text as the Recipe, or say what is wrong with it."""
        problems = self._model.apply_yaml(self.text.value)
        if problems:
            self._error.say(
                self._model.say("Nothing was changed.") + " " + " ".join(str(problem) for problem in problems)
            )
        else:
            self._error.clear()

    def _toggle(self) -> None:
        self._is_open = not self._is_open
        set_hidden(self.box, not self._is_open)
        if self._is_open:
            self.fill(only_changed=self._only_changed)

    def _changed(self, change: Change) -> None:
        if self._is_open and change.fields and change.reason != "refused":
            self.fill(only_changed=self._only_changed)


def summarise(recipe: Recipe) -> str:
    """Return the Recipe in one line for a person."""
    bits = f", {recipe.quantization.bits}-bit base" if recipe.quantization.bits else ""
    methods = {
        "lora": f"LoRA r={recipe.adapter.r}{bits}",
        "bottleneck": f"bottleneck {recipe.adapter.bottleneck_size}{bits}",
        "none": "full fine-tuning",
    }
    method = methods[recipe.adapter.method]
    where = recipe.hardware.emulate or {"auto": "this machine", "cpu": "CPU", "cuda": "GPU"}[recipe.hardware.device]
    batch = f"{recipe.training.effective_batch_size} samples per step"
    return " · ".join((recipe.model.name_or_path, recipe.data.name_or_path, method, batch, where))


def connect_fields(model: PanelModel, fields: Mapping[str, FieldView], header: Header) -> Callable[[Change], None]:
    """Keep controls and their problems in step with the model; return the listener."""

    def changed(change: Change) -> None:
        for path in change.fields:
            if path in fields and change.reason != "refused":
                fields[path].refresh()
        by_field: dict[str, list[Any]] = {}
        for problem in model.problems():
            by_field.setdefault(problem.field, []).append(problem)
        for path, view in fields.items():
            view.show_problems(by_field.get(path, ()))
        # What has no control, or has it behind a fold, is shown on top too: a problem nobody sees helps nobody.
        hidden = [path for path in by_field if path not in fields or fields[path].info.show != "main"]
        header.show_problems([problem for path in hidden for problem in by_field[path]])

    model.listen(changed)
    return changed
