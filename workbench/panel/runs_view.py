"""The tab of runs: a table of run folders, and what can be done with those that are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from ..events import Cancel, ProgressCallback
from ..pipeline.run_rows import RunRow, continue_changes, list_run_rows
from ..report.runs_html import render_cells, render_head
from ..train.run_folder import read_recipe_of
from ..train.run_store import delete_run, rename_run
from ..units import format_bytes
from .background import Background, Outcome
from .comms import answer_beside_cells
from .fields import classed, set_hidden, with_tooltip
from .pieces import ErrorBox, ProgressLine, button, card
from .runs_model import HEADER, KINDS, SORTS, RunsModel, cells_of
from .view_model import PanelModel

# Each row is two widgets; a page is slow to build with hundreds.
ROWS_AT_ONCE = 20


class RunsView:
    """The table of runs. ``model.chosen`` are those that the tabs of comparison and export work on."""

    def __init__(
        self, panel: PanelModel, background: Background, root: Path, *, open_run: Callable[[Path], Any]
    ) -> None:
        """Make the view; the runs are read when it is first shown.

        Args:
            panel: Takes the settings of a run that is cloned or continued.
            background: Reads the folders.
            root: Folder with the run folders.
            open_run: Shows a run in the first tab.
        """
        self.model = RunsModel()
        self.chosen_listeners: list[Callable[[], Any]] = []
        self.renamed_listeners: list[Callable[[Path, Path], Any]] = []
        self._panel, self._say = panel, panel.say
        self._background, self._root, self._open_run = background, root, open_run
        self._limit = ROWS_AT_ONCE
        self._boxes: dict[Path, Any] = {}
        say = self._say
        self._sort = with_tooltip(
            widgets.Dropdown, say("Order of the table"), options=[(say(name), name) for name in SORTS],
            description=say("Sort by"),
        )  # fmt: skip
        self._sort.observe(self._sorted, names="value")
        self._line = ProgressLine(lambda: background.cancel("runs"), say)
        self._error = ErrorBox()
        self._note = classed(widgets.HTML(), "wb-runs-note")
        self._rows = classed(widgets.VBox(()), "wb-runs-rows")
        self._more = button(say("Show more"), self._show_more, "wb-runs-more", "wb-hidden")
        self._asking = classed(widgets.VBox(()), "wb-asking", "wb-hidden")
        self._actions = self._make_actions()
        head = classed(
            widgets.HBox((widgets.HTML(f"<b>{escape(say('Run'))}</b>"),
                          widgets.HTML(render_head([say(name) for name in HEADER])))),
            "wb-runs-row", "wb-runs-head",
        )  # fmt: skip
        again = button(say("Read again"), self.request, "wb-runs-again", tooltip=say("Look at the folders again"))
        top = classed(widgets.HBox((classed(self._sort, "wb-sort"), again)), "wb-bar-row", "wb-actions")
        actions = classed(widgets.HBox(tuple(self._actions.values())), "wb-bar-row", "wb-run-actions")
        self._table = classed(widgets.VBox((head, self._rows)), "wb-runs-table", "wb-hidden")
        self.box = card(
            0, say("Runs"), say("Everything a run leaves lies in its folder; choose some to act on them."),
            (top, self._line.box, self._note, self._table, self._more, actions, self._asking, self._error.box),
            "wb-card-runs",
        )  # fmt: skip
        self._show_actions()

    def request(self) -> None:
        """Read the run folders again."""
        root = self._root

        def work(progress: ProgressCallback, cancel: Cancel) -> list[RunRow]:
            return list_run_rows(root, cancel)

        self._background.submit("runs", work, self._done)

    def _done(self, outcome: Outcome) -> None:
        self._line.hide()
        if outcome.error is not None:
            self._error.show(outcome.error, self._say("The runs could not be read"))
        elif not outcome.was_cancelled:
            self.model.set_rows(outcome.value)
            self._show_rows()

    # -- the table ---------------------------------------------------------------------------------------------------

    def _sorted(self, change: Any) -> None:
        self.model.sort = change["new"]
        self._show_rows()

    def _show_more(self) -> None:
        self._limit += ROWS_AT_ONCE
        self._show_rows()

    def _show_rows(self) -> None:
        rows, say = self.model.rows, self._say
        chosen = {row.summary.path for row in self.model.chosen}
        self._boxes = {}
        self._rows.children = tuple(self._row(row, row.summary.path in chosen) for row in rows[: self._limit])
        set_hidden(self._table, not rows)
        set_hidden(self._more, len(rows) <= self._limit)
        size = format_bytes(self.model.num_bytes)
        words = say("No runs in {root} yet. Start one in the first tab.", root=self._root)
        if rows:
            words = say("Runs in {root}: {count}, {size} on disk", count=len(rows), root=self._root, size=size)
        self._note.value = f'<div class="wb-hint" role="status">{escape(words)}</div>'
        answer_beside_cells(self._rows)
        self._tell()

    def _row(self, row: RunRow, is_chosen: bool) -> Any:
        path = row.summary.path
        box = with_tooltip(widgets.Checkbox, str(path), description=row.summary.name, value=is_chosen, indent=False)
        box.observe(lambda change: self._chose(path, change["new"]), names="value")
        self._boxes[path] = box
        names = [self._say(name) for name in HEADER]
        kinds = (f"state wb-state-{row.summary.state}", *KINDS[1:])
        cells = widgets.HTML(render_cells(names, cells_of(row, self._say), kinds))
        return classed(widgets.HBox((box, cells)), "wb-runs-row")

    def _chose(self, path: Path, chosen: bool) -> None:
        self.model.choose(path, chosen)
        self._tell()

    def _tell(self) -> None:
        self._stop_asking()
        self._show_actions()
        for listener in self.chosen_listeners:
            listener()

    # -- what can be done --------------------------------------------------------------------------------------------

    def _make_actions(self) -> dict[str, Any]:
        say = self._say
        texts = {
            "open": (say("Open"), say("Show this run; one that is live in this kernel is attached"), self._open),
            "continue": (say("Start from its adapter"), say("Set a new run to start from what this one learned"),
                         self._continue),
            "clone": (say("Take its settings"), say("Copy this run's settings; undo takes it back"), self._clone),
            "rename": (say("Rename"), say("Give the folder another name"), self._ask_name),
            "delete": (say("Delete…"), say("Delete the chosen runs; asks first"), self._ask_delete),
        }  # fmt: skip
        return {
            name: button(label, lambda act=act: self._try(act), f"wb-run-{name}", tooltip=tip)
            for name, (label, tip, act) in texts.items()
        }

    def _show_actions(self) -> None:
        count = len(self.model.chosen)
        for name, made in self._actions.items():
            made.disabled = count == 0 if name == "delete" else count != 1

    def _try(self, act: Callable[[], Any]) -> None:
        self._error.clear()
        self._stop_asking()
        try:
            act()
        except Exception as error:
            self._error.show(error)

    def _one(self) -> RunRow:
        return self.model.chosen[0]

    def _open(self) -> None:
        self._open_run(self._one().summary.path)

    def _continue(self) -> None:
        row = self._one()
        problems = self._panel.set_fields(continue_changes(row.summary.path))
        self._say_done("The next run starts from the adapter of {name}.", problems, row)

    def _clone(self) -> None:
        row = self._one()
        self._panel.take(read_recipe_of(row.summary.path), "clone")
        self._say_done("The settings are now those of {name}; undo takes it back.", (), row)

    def _say_done(self, text: str, problems: Sequence[Any], row: RunRow) -> None:
        if problems:
            self._error.say(" ".join(str(problem) for problem in problems))
            return
        words = self._say(text, name=row.summary.name)
        self._ask(widgets.HTML(f'<div class="wb-note wb-note-good" role="status">{escape(words)}</div>'))

    def _ask_name(self) -> None:
        row = self._one()
        name = with_tooltip(
            widgets.Text, self._say("The folder's new name"), description=self._say("New name"), value=row.summary.name
        )
        save = button(
            self._say("Save the name"), lambda: self._try(lambda: self._rename(row, name.value)), "wb-primary"
        )
        self._ask(classed(name, "wb-name"), classed(widgets.HBox((save, self._keep())), "wb-bar-row"))

    def _rename(self, row: RunRow, name: str) -> None:
        old = row.summary.path
        new = rename_run(old, name)
        for listener in self.renamed_listeners:
            listener(old, new)
        self.request()

    def _ask_delete(self) -> None:
        rows = self.model.chosen
        size = format_bytes(sum(row.summary.num_bytes for row in rows))
        names = ", ".join(row.summary.name for row in rows)
        words = self._say("Delete {names}? {size} become free. This cannot be undone.", names=names, size=size)
        text = widgets.HTML(f'<div class="wb-alert" role="alert">{escape(words)}</div>')
        really = button(self._say("Delete for good"), lambda: self._try(lambda: self._delete(rows)), "wb-danger")
        self._ask(text, classed(widgets.HBox((really, self._keep())), "wb-bar-row"))

    def _delete(self, rows: Sequence[RunRow]) -> None:
        try:
            for row in rows:
                delete_run(row.summary.path)
        finally:
            self.request()

    def _keep(self) -> Any:
        return button(self._say("Leave as it is"), self._stop_asking, "wb-keep")

    def _ask(self, *parts: Any) -> None:
        self._asking.children = parts
        set_hidden(self._asking, False)
        answer_beside_cells(self._asking)

    def _stop_asking(self) -> None:
        if self._asking.children:
            self._asking.children = ()
            set_hidden(self._asking, True)
