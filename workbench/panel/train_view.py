"""Section 4: start, pause, resume and stop a run; progress, plots, the leak verdict and the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets as widgets
import numpy as np

from ..estimate.estimate import Estimate
from ..events import LIVE_STATES, Progress
from ..pipeline.run_rows import Prediction, write_prediction
from ..report.findings_html import render_finding
from ..report.html import render_failure
from ..report.run_html import render_result, render_run_facts, render_run_head, render_samples
from .fields import classed, set_hidden
from .pieces import ErrorBox, button, card, render_progress
from .remedy_view import RemedyView
from .runs import EndedRun, describe_leak, list_findings, list_samples, read_facts, read_failure
from .stream import Flusher, choose_plot
from .texts import Say

LEAK_EVERY_STEPS = 10
# Steps after which the measured time of a step takes the place of the predicted one on the estimate card.
ANCHOR_STEPS = (3, 20)
# Growth that ends, or comes and goes, is no leak: said without alarm.
LEAK_NOTES = {
    "leak": "bad", "fragmentation": "warn", "warm_up": "good", "clean": "good", "bounded_buffer": "good",
    "periodic": "good", "longer_batch": "good", "cycle": "good", "too_early": "",
}  # fmt: skip


class TrainView:
    """The training card. ``session`` is the run it shows, or None."""

    def __init__(
        self,
        start: Callable[[], Any],
        plots: str,
        continue_with: Callable[[Mapping[str, Any]], Any],
        before: Any,
        say: Say | None = None,
    ) -> None:
        """Make the card.

        Args:
            start: Starts a run with the settings as they stand.
            plots: As for ``Workbench``.
            continue_with: Goes on with the ended run and these changes.
            before: Box with what can be tried before a run.
            say: The panel's words.
        """
        self._say = say or Say()
        self.session: Any = None
        self.ended_listeners: list[Callable[[Any], None]] = []
        self._plot = choose_plot(plots)
        self._flusher: Flusher | None = None
        self._estimate: Estimate | None = None
        self._anchored_steps = 0
        self.anchor_listeners: list[Callable[[float], None]] = []
        self._levels: dict[str, list[tuple[str, float]]] = {}
        self._last_state = ""
        self._leak_step = -1
        self._start_button = button(self._say("Start training"), start, "wb-primary", "wb-start")
        self._pause_button = button(
            self._say("Pause"),
            self._pause,
            "wb-pause",
            tooltip=self._say("Pause after this micro-step; memory stays"),
        )
        self._resume_button = button(
            self._say("Resume"), self._resume, "wb-resume", tooltip=self._say("Go on with the next step")
        )
        self._stop_button = button(
            self._say("Stop and save"),
            self._stop,
            "wb-stop",
            tooltip=self._say("End after this micro-step and save what was learned"),
        )
        buttons = (self._start_button, self._pause_button, self._resume_button, self._stop_button)
        self._head = widgets.HTML()
        self._progress = widgets.HTML()
        self._facts = widgets.HTML()
        self._leak = classed(widgets.HTML(), "wb-leak")
        self._findings = classed(widgets.HTML(), "wb-findings")
        self._result = classed(widgets.HTML(), "wb-result")
        self._samples = classed(widgets.HTML(), "wb-run-samples")
        self.remedies = RemedyView(continue_with)
        self.error = ErrorBox()
        # In a box of its own: third-party widgets do not follow changes of their classes.
        self._plot_box = classed(widgets.VBox((getattr(self._plot, "widget", self._plot),)), "wb-plots")
        self.box = card(
            4,
            self._say("Train"),
            self._say("Runs in this kernel; cells and buttons keep working, and the page may be closed."),
            (
                before,
                classed(widgets.HBox(buttons), "wb-bar-row"),
                self.error.box,
                self._head,
                self._progress,
                self._facts,
                self._result,
                self._findings,
                self.remedies.box,
                self._leak,
                self._plot_box,
                self._samples,
            ),
            "wb-card-train",
        )
        set_hidden(self._plot_box, True)
        self._show_state("idle")

    def set_estimate(self, estimate: Estimate) -> None:
        """Take the prediction for the memory plot of the next run; a live run keeps the one it began with."""
        self._estimate = estimate

    def attach(self, session: Any) -> None:
        """Show a session, from its first step on, and follow it to its end."""
        if self._flusher:
            self._flusher.stop()
        self.session = session
        self._last_state = ""
        self._leak_step = -1
        self._levels = {}
        self._anchored_steps = 0
        self._plot.set_level("memory", "predicted peak", None)
        self.error.clear()
        self.remedies.clear()
        self._result.value = self._findings.value = self._leak.value = ""
        self._plot.attach(getattr(session, "history", None), str(session.run_dir))
        set_hidden(self._plot_box, False)
        self._show_samples(session)
        self._tick(True)
        if self._can_control():
            self._flusher = Flusher(self._tick, lambda: session.state).start()

    @property
    def levels(self) -> dict[str, list[tuple[str, float]]]:
        """Levels drawn across the plots, such as the predicted peak."""
        return self._levels

    def finish(self) -> None:
        """Wait until the last rows of an ended run are shown."""
        if self._flusher:
            self._flusher.join()

    def close(self) -> None:
        """End the flusher; the run goes on."""
        if self._flusher:
            self._flusher.stop()

    # -- buttons ---------------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        self._command("pause")

    def _resume(self) -> None:
        self._command("resume")

    def _stop(self) -> None:
        self._command("stop")

    def _command(self, name: str) -> None:
        session = self.session
        if session is None:
            return
        try:
            getattr(session, name)()
        except Exception as error:
            self.error.show(error, f"{name.capitalize()} was refused")
        self._show_state(session.state)

    # -- what the flusher calls --------------------------------------------------------------------------------------

    def _tick(self, heartbeat: bool) -> None:
        session = self.session
        state = session.state
        self._plot.state = state
        self._plot.flush(heartbeat=heartbeat)
        self._show_prediction(session)
        self._anchor(session)
        facts = read_facts(session)
        if not isinstance(session, EndedRun):
            self._show_samples(session)
        _set(self._facts, render_run_facts(facts))
        _set(self._progress, self._render_progress(session, facts))
        if facts.step != self._leak_step and (
            state not in LIVE_STATES or facts.step >= self._leak_step + LEAK_EVERY_STEPS
        ):
            self._leak_step = facts.step
            self._show_leak(session)
        if state != self._last_state:
            self._show_state(state)
            if state not in LIVE_STATES:
                self._show_end(session)

    def _show_samples(self, session: Any) -> None:
        _set(self._samples, render_samples(list_samples(session), self._say))

    def _show_prediction(self, session: Any) -> None:
        if "memory" not in self._levels:
            level = predicted_peak(self._estimate, session)
            if level is not None and self._estimate is not None:
                write_prediction(session.run_dir, prediction_of(self._estimate, level))
                self._levels["memory"] = [("predicted peak", level)]
                self._plot.set_level("memory", "predicted peak", level)

    def _anchor(self, session: Any) -> None:
        """Tell the estimate what a step of this run took: the first time after three steps, then with more of them."""
        history, estimate = getattr(session, "history", None), self._estimate
        wanted = next((count for count in reversed(ANCHOR_STEPS) if history is not None and len(history) >= count), 0)
        if wanted <= self._anchored_steps or estimate is None or session.recipe.hardware.emulate:
            return
        self._anchored_steps = wanted
        if estimate.recipe_digest == session.recipe.digest():
            # The first step makes the optimizer's state and is no measure of the others.
            step_s = float(np.nanmedian(history.column("step_s")[1:wanted]))
            for listener in self.anchor_listeners:
                listener(step_s)

    def _render_progress(self, session: Any, facts: Any) -> str:
        if facts.state == "preparing":
            progress = getattr(session, "progress", None) or Progress("load", message="Preparing")
            return render_progress(progress, run=True)
        if not facts.num_steps:
            return ""
        words = " · ".join(part for part in (facts.position, facts.time_left) if part)
        return render_progress(Progress("train", facts.step, facts.num_steps, words), run=True)

    def _can_control(self) -> bool:
        """Whether the run shown is live in this kernel; one read from a folder may be live in another."""
        return self.session is not None and not isinstance(self.session, EndedRun) and self.session.state in LIVE_STATES

    def _show_state(self, state: str) -> None:
        self._last_state = state
        live = self._can_control()
        run_dir = self.session.run_dir if self.session is not None else None
        _set(self._head, render_run_head(state, None if run_dir is None else str(run_dir)))
        self._start_button.disabled = live
        self._start_button.description = (
            self._say("Start training") if self.session is None else self._say("Start a new run")
        )
        self._pause_button.disabled = not live or state not in ("preparing", "running")
        self._resume_button.disabled = not live or state not in ("pausing", "paused")
        self._stop_button.disabled = not live or state == "stopping"
        set_hidden(self._progress, not live and state != "stopped")

    def _show_leak(self, session: Any) -> None:
        word, text = describe_leak(session)
        if text:
            kind = f" wb-note-{LEAK_NOTES[word]}" if LEAK_NOTES.get(word) else ""
            _set(self._leak, f'<div class="wb-note{kind}">{escape(text)}</div>')
        _set(self._findings, "".join(render_finding(finding) for finding in list_findings(session)))

    def _show_end(self, session: Any) -> None:
        failure = read_failure(session)
        if failure is not None:
            self.error.show_html(render_failure(*failure, self._say("The run failed")))
        if getattr(session, "can_continue", False):
            plain = "" if session.remedies() else self._say("Continue")
            self.remedies.show(session.remedies(), self._say("Apply and continue"), plain)
        facts = read_facts(session)
        self._result.value = render_result(facts.state, facts.position, facts.loss, session.run_dir, session.result_dir)
        for listener in self.ended_listeners:
            listener(session)


def predicted_peak(estimate: Estimate | None, session: Any) -> float | None:
    """Return the level that a run's measured peak is compared with, or None where they are not the same thing.

    The prediction counts what the run allocates; what the process held before is added. An estimate for another device
    or other settings says nothing about this run.
    """
    baseline = getattr(getattr(session, "meter", None), "baseline_bytes", None)
    if estimate is None or baseline is None or session.recipe.hardware.emulate:
        return None
    if estimate.recipe_digest != session.recipe.digest():
        return None
    return float(estimate.memory.peak_allocated_bytes + baseline)


def prediction_of(estimate: Estimate, peak_bytes: float) -> Prediction:
    """Return what the run's folder keeps of the prediction.

    Args:
        estimate: Of this very run, made before it.
        peak_bytes: From ``predicted_peak``.
    """
    return Prediction(peak_bytes, estimate.time.step_s, estimate.device_name)


def _set(widget: Any, value: str) -> None:
    """Set HTML only when it is new: every set replaces the subtree in the page."""
    if widget.value != value:
        widget.value = value
