"""Before the run: the pre-flight check and the dry step, each behind a button."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from ..events import Cancel, ProgressCallback
from ..report.findings_html import render_finding, render_findings_list
from .background import Background, Outcome
from .fields import classed
from .pieces import ErrorBox, ProgressLine, button
from .remedy_view import RemedyView
from .runs import require_no_live_session
from .view_model import Change, PanelModel

CHECK, DRY_STEP = "check", "dry step"


class BeforeView:
    """Two buttons and what they found. What was found is of the settings it was found for: a change takes it away."""

    def __init__(self, model: PanelModel) -> None:
        """Make the view.

        Args:
            model: Gives the settings, and takes those of a remedy.
        """
        self._model, self._say = model, model.say
        say = self._say
        self._background = Background("workbench-before")
        self._running = ""
        self._check_button = button(
            say("Check the settings"),
            self.check,
            "wb-check",
            tooltip=say("Look for silent faults: data, labels, adapter, saving"),
        )
        self._dry_button = button(
            say("Try the longest batch"),
            self.try_worst_batch,
            "wb-dry",
            tooltip=say("Two steps with the longest batch, an evaluation and a save: does all of it have room?"),
        )
        self._line = ProgressLine(self._cancel, say)
        self._found = classed(widgets.HTML(), "wb-before-found")
        self._remedies = RemedyView(self._apply)
        self._error = ErrorBox()
        buttons = classed(widgets.HBox((self._check_button, self._dry_button)), "wb-bar-row")
        self.box = classed(
            widgets.VBox((buttons, self._line.box, self._error.box, self._found, self._remedies.box)), "wb-before"
        )
        model.listen(self._changed)

    @property
    def is_busy(self) -> bool:
        """Whether one of the two is at work."""
        return bool(self._running)

    @property
    def text(self) -> str:
        """What is shown, as HTML."""
        return str(self._found.value)

    def check(self) -> None:
        """Run the pre-flight audit of the settings as they stand."""
        recipe = self._model.recipe

        def work(progress: ProgressCallback, cancel: Cancel) -> Any:
            from ..components.libraries import load_libraries

            load_libraries()
            from ..pipeline import check

            return check(recipe, progress=progress, cancel=cancel)

        def show(found: Any) -> None:
            self._found.value = render_findings_list(
                [finding.to_dict() for finding in found], "Checked: no fault found in data, labels, adapter or saving."
            )
            self._remedies.show([fix for finding in found for fix in finding.fixes], self._say("Apply"))

        self._run(CHECK, work, show)

    def try_worst_batch(self) -> None:
        """Run the dry step of the settings as they stand."""
        recipe = self._model.recipe

        def work(progress: ProgressCallback, cancel: Cancel) -> Any:
            from ..pipeline import try_worst_batch

            return try_worst_batch(recipe, progress=progress, cancel=cancel)

        def show(report: Any) -> None:
            if report.finding is None:
                self._found.value = render_findings_list((), report.text)
                return
            self._found.value = render_finding(report.finding.to_dict())
            self._remedies.show(report.finding.fixes, self._say("Apply"))

        self._run(DRY_STEP, work, show)

    def wait(self, timeout_s: float = 300.0) -> None:
        """Wait until what was started is done.

        Raises:
            TimeoutError: It took longer than ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while self.is_busy:
            if time.monotonic() > deadline:
                raise TimeoutError(f"The {self._running} took more than {timeout_s:g} s. Cancel it, or wait longer.")
            time.sleep(0.02)

    def close(self) -> None:
        """End the background thread."""
        self._background.close()

    def _run(self, name: str, work: Any, show: Any) -> None:
        recipe = self._model.recipe
        self._clear()
        try:
            require_no_live_session()
        except Exception as error:
            self._error.show(error, f"The {name} was not started")
            return
        self._set_running(name)

        def done(outcome: Outcome) -> None:
            self._set_running("")
            self._line.hide()
            if outcome.error is not None:
                self._error.show(outcome.error, f"The {name} did not end")
            elif not outcome.was_cancelled and self._model.recipe == recipe:
                show(outcome.value)

        self._background.submit(name, work, done, on_progress=self._line.show)

    def _set_running(self, name: str) -> None:
        self._running = name
        self._check_button.disabled = self._dry_button.disabled = bool(name)

    def _cancel(self) -> None:
        self._background.cancel(self._running)

    def _apply(self, changes: Mapping[str, Any]) -> None:
        self._clear()
        self._model.set_fields(dict(changes))

    def _changed(self, change: Change) -> None:
        if change.reason != "refused" and not self._running:
            self._clear()

    def _clear(self) -> None:
        self._found.value = ""
        self._remedies.clear()
        self._error.clear()
