"""The tab of exports: a run's result in every format that the workbench writes, with progress, grade and place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from ..errors import RunError
from ..events import LIVE_STATES, Cancel, Progress, ProgressCallback
from ..export.formats import FORMATS, WEIGHT_BITS
from ..pipeline.run_rows import RunRow
from ..report.runs_html import render_grid
from ..train.run_folder import RECIPE
from ..units import format_bytes
from .background import Background, Outcome
from .fields import classed, with_tooltip
from .pieces import ErrorBox, ProgressLine, button, card, field_box
from .runs import require_no_live_session
from .texts import Say

EXPORT = "export"
# Its settings alone are a file of the run already.
YAML = "yaml"


def exported(run_dir: Path) -> list[tuple[str, Path, int]]:
    """Return ``(format, folder, bytes)`` of what lies in a run's folder for exports."""
    found = []
    for name in FORMATS:
        folder = run_dir / "exports" / name
        if folder.is_dir():
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            found.append((name, folder, size))
    return found


def report_rows(report: Any) -> list[list[str]]:
    """Return what an export found when it was read back, as rows of a name and a value.

    Args:
        report: An ``ExportReport``.
    """
    from ..export.page import GRADE_HEADER, grade_cells

    rows = [[name.replace("_", " "), _word(value)] for name, value in report.checks.items()]
    if report.grade is not None:
        cells = grade_cells(report.format, report.grade)
        rows += [list(pair) for pair in zip(GRADE_HEADER[1:], cells[1:], strict=True)]
    return rows


class ExportView:
    """One run, one format, one button; what is there already below."""

    def __init__(self, background: Background, say: Say, *, rows: Callable[[], Sequence[RunRow]]) -> None:
        """Make the view.

        Args:
            background: Does the work.
            say: The panel's words.
            rows: The runs, those that are chosen first.
        """
        self._background, self._say, self._find_rows = background, say, rows
        self._run = with_tooltip(
            widgets.Dropdown, say("The run whose result is exported"), options=[("–", "")], description=say("Run")
        )
        self._format = with_tooltip(
            widgets.Dropdown, say("What is written"), description=say("Format"), value="adapter",
            options=[*((name, name) for name in FORMATS), (say("settings as YAML"), YAML)],
        )  # fmt: skip
        self._out = with_tooltip(
            widgets.Text, say("Folder to make; empty makes one in the run's folder"), description=say("Folder"),
            placeholder=say("exports/FORMAT in the run's folder"), continuous_update=False,
        )  # fmt: skip
        self._what = widgets.HTML()
        self._button = button(say("Export"), self.export, "wb-primary", "wb-export-start")
        self._line = ProgressLine(lambda: background.cancel(EXPORT), say)
        self._error = ErrorBox()
        self._result = classed(widgets.HTML(), "wb-export-result")
        self._there = classed(widgets.HTML(), "wb-exports")
        for control in (self._run, self._format):
            control.observe(lambda change: self._changed(), names="value")
        fields = classed(
            widgets.VBox([field_box(one) for one in (self._run, self._format, self._out)]),
            "wb-fields", "wb-fields-wide",
        )  # fmt: skip
        self.box = card(
            0, say("Export"), say("Written beside its name and moved there when it is whole; read back and graded."),
            (fields, self._what, classed(widgets.HBox((self._button,)), "wb-bar-row"), self._line.box,
             self._error.box, self._result, self._there),
            "wb-card-export",
        )  # fmt: skip
        self._changed()

    def request(self) -> None:
        """List the runs that are there now."""
        rows = list(self._find_rows())
        before = self._run.value
        options = [(row.summary.name, str(row.summary.path)) for row in rows] or [("–", "")]
        if tuple(options) != tuple(self._run.options):
            self._run.options = options
            if before in [value for _, value in options]:
                self._run.value = before
        self._changed()

    def export(self) -> None:
        """Export the chosen run in the chosen format."""
        run_dir, to, out = self._run.value, self._format.value, self._out.value.strip()
        self._error.clear()
        self._result.value = ""
        if to == YAML:
            self._show_yaml(Path(run_dir))
            return

        def work(progress: ProgressCallback, cancel: Cancel) -> Any:
            from ..export import export_run

            return export_run(run_dir, to, out or None, progress=progress, cancel=cancel)

        if to in WEIGHT_BITS:
            try:  # Whole models are made in this process, beside a run's.
                require_no_live_session()
            except RunError as error:
                self._error.say(str(error))
                return
        self._button.disabled = True
        self._line.show(Progress(EXPORT, message=to))
        self._background.submit(EXPORT, work, self._done, on_progress=self._line.show)

    def _show_yaml(self, run_dir: Path) -> None:
        path = run_dir / RECIPE
        text = path.read_text(encoding="utf-8")
        self._result.value = (
            f'<div class="wb-note wb-note-good" role="status">{escape(self._say("The settings are in"))} '
            f'<code>{escape(str(path))}</code></div><pre class="wb-row-text" tabindex="0">{escape(text)}</pre>'
        )

    def _done(self, outcome: Outcome) -> None:
        say = self._say
        self._line.hide()
        self._button.disabled = False
        if outcome.was_cancelled:
            self._error.say(say("Cancelled. Nothing half-written stays."))
        elif outcome.error is not None:
            self._error.show(outcome.error, say("Nothing was exported"))
        else:
            report = outcome.value
            rows = report_rows(report)
            table = render_grid([say("Read back"), say("Value")], rows, say("What was found")) if rows else ""
            self._result.value = (
                f'<div class="wb-note wb-note-good" role="status"><b>{escape(say("Exported"))}</b>: '
                f"<code>{escape(str(report.path))}</code>, {format_bytes(report.num_bytes)}</div>{table}"
            )
        self._show_there()

    def _changed(self) -> None:
        say, to = self._say, self._format.value
        text = FORMATS[to] if to in FORMATS else say("the run's settings, which workbench train takes")
        self._what.value = f'<div class="wb-hint">{escape(text)}</div>'
        chosen = next((row for row in self._find_rows() if str(row.summary.path) == self._run.value), None)
        self._button.disabled = chosen is None or chosen.summary.state in LIVE_STATES
        self._show_there()

    def _show_there(self) -> None:
        there = exported(Path(self._run.value)) if self._run.value else []
        rows = [[name, format_bytes(size), str(path)] for name, path, size in there]
        say = self._say
        header = [say("Format"), say("Size"), say("Folder")]
        self._there.value = render_grid(header, rows, say("Exports of this run")) if rows else ""


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
