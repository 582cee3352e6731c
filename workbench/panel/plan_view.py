"""What else would fit: buttons that ask the plan, and its answers as rows with a button that applies each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets as widgets

from ..estimate.estimate import BatchShape
from ..events import Cancel, Progress, ProgressCallback
from ..hardware import target_device
from ..plan.plan import PlanOption
from ..recipe import Recipe
from ..report import plan_tables
from ..report.plan_tables import PlanTable, describe_changes, render_plan_row
from .background import Background, Outcome
from .comms import answer_beside_cells
from .fields import classed, with_tooltip
from .pieces import ErrorBox, Fold, ProgressLine, button
from .view_model import Change, PanelModel

# Rows shown at once; tables of devices are longer.
MAX_ROWS = 12

# What the buttons ask: their words, and what they say when pointed at.
QUESTIONS: dict[str, tuple[str, str]] = {
    "fit": (
        "Make it fit",
        "Change the settings so that the run surely fits and stays as fast as it can; undo takes it back",
    ),
    "settings": (
        "Settings that fit",
        "List the settings that no others beat in memory and time; the effective batch stays",
    ),
    "batch": ("Largest batch", "Find the most samples in one forward pass"),
    "length": ("Longest samples", "Find the largest max length"),
    "model": ("Largest model", "Find the largest model of the catalogue with these settings"),
    "devices": ("Which device", "Estimate this run on every device of the table"),
}


def answer(
    question: str,
    recipe: Recipe,
    *,
    shape: BatchShape | None,
    pinned: frozenset[str] | None,
    progress: ProgressCallback,
    cancel: Cancel,
) -> PlanOption | PlanTable:
    """Ask the plan; plain data in and out.

    Args:
        question: A key of QUESTIONS.
        recipe: The settings as they stand.
        shape: Batches of the chosen data, or None.
        pinned: Fields that stay as they are; None: those that differ from a plain Recipe.
        progress: Told how far it is.
        cancel: Looked at in every estimate.
    """
    from .. import plan

    told: dict[str, Any] = {"progress": progress, "cancel": cancel}
    if question == "devices":
        return plan_tables.devices_table(plan.which_device(recipe, shape=shape, **told))
    device = target_device(recipe)
    if question == "fit":
        return plan.make_fit(recipe, device, shape=shape, pinned=pinned, **told)
    if question == "settings":
        return plan_tables.front_table(plan.find_settings(recipe, device, shape=shape, pinned=pinned, **told))
    if question == "batch":
        return plan_tables.largest_table(plan.largest_batch(recipe, device, shape=shape, **told))
    if question == "length":
        return plan_tables.largest_table(plan.largest_length(recipe, device, **told))
    return plan_tables.largest_table(plan.largest_model(recipe, device, **told))


class PlanView:
    """A fold with the plan's questions and the newest answer."""

    def __init__(
        self, model: PanelModel, background: Background, *, find_shape: Callable[[Recipe], BatchShape | None]
    ) -> None:
        self.finished_listeners: list[Callable[[], None]] = []
        self._model = model
        self._background = background
        self._find_shape = find_shape
        self._is_asking = False
        self._progress = ProgressLine(lambda: background.cancel("plan"), model.say)
        self._error = ErrorBox()
        self._head = widgets.HTML()
        self._rows = classed(widgets.VBox(), "wb-options", "wb-plan-rows")
        self._notes = widgets.HTML()
        self._all = with_tooltip(
            widgets.Checkbox,
            model.say("Let “Make it fit” and “Settings that fit” also change fields that differ from the defaults"),
            description=model.say("Also change what I set"),
            value=False,
            indent=False,
        )
        buttons = [
            button(model.say(label), lambda name=name: self.ask(name), f"wb-ask-{name}", tooltip=model.say(tip))
            for name, (label, tip) in QUESTIONS.items()
        ]
        row = classed(widgets.HBox(tuple(buttons)), "wb-bar-row", "wb-plan-buttons")
        children = (row, self._all, self._progress.box, self._error.box, self._head, self._rows, self._notes)
        self.box = Fold(model.say("What fits: settings, batch, model, device"), children, name="wb-plan-open").box
        model.listen(self._changed)

    def ask(self, question: str) -> None:
        """Ask the plan one of QUESTIONS about the settings as they stand."""
        recipe = self._model.recipe
        pinned = frozenset[str]() if self._all.value else None
        self._clear()
        self._is_asking = True
        self._progress.show(Progress("plan", message=self._model.say(QUESTIONS[question][0])))
        self._background.submit(
            "plan",
            lambda p, c: answer(question, recipe, shape=self._find_shape(recipe), pinned=pinned, progress=p, cancel=c),
            lambda outcome: self._done(question, outcome),
            priority=2,
            on_progress=self._progress.show,
        )

    def show(self, table: PlanTable) -> None:
        """Show an answer: its sentence, a row for each setting, its notes."""
        self._head.value = f'<div class="wb-plan-head" role="status">{escape(table.title)}</div>'
        rows = []
        for cells, changes in list(zip(table.rows, table.changes, strict=True))[:MAX_ROWS]:
            row = [widgets.HTML(render_plan_row(table.header, cells))]
            if changes:
                apply = button(self._model.say("Apply"), lambda one=changes: self._apply(one), "wb-apply")
                apply.tooltip = f"Set {describe_changes(changes)}"
                row.append(apply)
            rows.append(classed(widgets.HBox(tuple(row)), "wb-option-row"))
        self._rows.children = tuple(rows)
        more = len(table.rows) - len(rows)
        notes = [*table.notes, *([f"{more} more rows: workbench plan shows all of them."] if more > 0 else [])]
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        self._notes.value = f'<ul class="wb-plan-notes">{items}</ul>' if items else ""
        answer_beside_cells(self._rows)

    def _done(self, question: str, outcome: Outcome) -> None:
        self._is_asking = False
        self._progress.hide()
        if outcome.was_cancelled:
            self._error.say(self._model.say("Cancelled. Nothing was changed."))
        elif outcome.error is not None:
            self._error.show(outcome.error, self._model.say("No answer"))
        elif question == "fit":
            self._fit(outcome.value)
        else:
            self.show(outcome.value)
        for listener in self.finished_listeners:
            listener()

    def _fit(self, option: PlanOption) -> None:
        if not option.changes:
            self._head.value = '<div class="wb-plan-head" role="status">It fits as it is; nothing was changed.</div>'
            return
        self._apply(option.changes)
        alters = f" It {', '.join(option.alters)}." if option.alters else " The run learns the same, up to rounding."
        words = f"Changed: {describe_changes(option.changes)}.{alters} Undo takes it back."
        self._head.value = f'<div class="wb-plan-head" role="status">{escape(words)}</div>'

    def _apply(self, changes: Mapping[str, Any]) -> None:
        self._model.set_fields(changes, "fix")

    def _changed(self, change: Change) -> None:
        if change.fields and change.reason != "refused":
            self._background.drop("plan")
            self._clear()

    def _clear(self) -> None:
        if self._is_asking:
            self._is_asking = False
            self._progress.hide()
        self._error.clear()
        self._head.value = self._notes.value = ""
        self._rows.children = ()
