"""The panel of a watched loop: the same plots, facts, findings and leak verdict as for a run of the workbench's own."""

from __future__ import annotations

import math
from html import escape
from typing import Any

import ipywidgets as widgets

from ..events import LIVE_STATES, Event
from ..observe.history import History
from ..report.findings_html import render_finding
from ..report.run_html import render_run_facts
from .fields import classed, set_hidden
from .pieces import style_sheet
from .runs import read_facts
from .stream import Flusher, choose_plot

STATE_WORDS = {"idle": "Not started yet", "running": "Running", "done": "Ended", "failed": "Ended with an exception"}


class WatchedLoop:
    """A watched loop as plain data: what the panel needs in place of a session. No widgets.

    Attributes:
        state: ``"idle"`` before the first step, then ``"running"``, then ``"done"`` or ``"failed"``.
        history: Its steps, those before the panel was opened included.
        num_steps: None: how long a loop runs is its own affair.
    """

    def __init__(self, watch: Any) -> None:
        self.watch = watch
        self.history = History()
        self.num_steps: int | None = None
        self.error = ""
        inner = self._inner()
        self.state = "idle" if inner is None or not inner.num_steps else "running" if inner.is_open else "done"
        if inner is not None:
            for row in inner.record.rows_of_history():
                self._append(row)
        watch.add_observer(self)

    def on_event(self, event: Event) -> None:
        """Take a step or a change of state in; called by the loop's thread."""
        if event.kind == "step":
            self.state = "running"
            self._append(event.data)
        elif event.kind == "state":
            self.state, self.error = str(event.data["state"]), str(event.data.get("error", ""))

    def findings(self) -> list[dict[str, Any]]:
        """Return what the doctors found so far as plain values."""
        return [finding.to_dict() for finding in self.watch.findings]

    def memory_text(self) -> str:
        """Return a verdict of health on memory, or that nothing gave a reason to look; faults are in ``findings``."""
        verdict = self.watch.memory_verdict
        if verdict is not None:
            return "" if verdict.is_fault else str(verdict.summary)
        steps = len(self.history)
        return f"Memory gave no reason for a deep look in {steps} steps." if steps else ""

    def _inner(self) -> Any:
        return self.watch if hasattr(self.watch, "record") else self.watch.watch

    def _append(self, data: Any) -> None:
        seconds, tokens = data.get("step_s") or math.nan, data.get("num_tokens") or math.nan
        self.history.append({**data, "tokens_per_s": tokens / seconds})


class LoopPanel:
    """Shows a watched loop, live or ended. In a notebook: ``w.panel()``, or ``w`` as the last line of a cell."""

    def __init__(self, watch: Any, *, plots: str = "auto") -> None:
        """Make the panel.

        Args:
            watch: What ``workbench.watch`` returned, or a Lightning callback.
            plots: As for ``Workbench``.
        """
        self.loop = WatchedLoop(watch)
        self._plot = choose_plot(plots)
        self._head, self._facts = widgets.HTML(), widgets.HTML()
        self._findings = classed(widgets.HTML(), "wb-findings")
        self._memory = classed(widgets.HTML(), "wb-leak")
        plot_box = classed(widgets.VBox((getattr(self._plot, "widget", self._plot),)), "wb-plots")
        parts = (self._head, self._facts, self._findings, self._memory, plot_box)
        self.widget = classed(
            widgets.VBox((style_sheet(), classed(widgets.VBox(parts), "wb-card", "wb-card-train"))), "wb-panel"
        )
        self._plot.attach(self.loop.history, f"watch {id(watch)}")
        self._flusher: Flusher | None = None
        self.refresh(True)
        if self.loop.state in ("idle", *LIVE_STATES):
            self._flusher = Flusher(self.refresh, lambda: "running" if self.loop.state == "idle" else self.loop.state)
            self._flusher.start()

    def refresh(self, heartbeat: bool = False) -> None:
        """Bring everything up to date; the flusher calls it a few times a second."""
        loop = self.loop
        self._plot.state = loop.state
        self._plot.flush(heartbeat=heartbeat)
        error = f" {escape(loop.error)}" if loop.error else ""
        _set(
            self._head,
            f'<div class="wb-run-head">Watched loop · {STATE_WORDS.get(loop.state, loop.state)}.{error}</div>',
        )
        _set(self._facts, render_run_facts(read_facts(loop)) if len(loop.history) else "")
        _set(self._findings, "".join(render_finding(finding) for finding in loop.findings()))
        text = loop.memory_text()
        _set(self._memory, f'<div class="wb-note">{escape(text)}</div>' if text else "")
        set_hidden(self._memory, not text)

    def close(self) -> None:
        """Take the panel away; the watch goes on."""
        if self._flusher is not None:
            self._flusher.stop()
        self.widget.close()

    def __repr__(self) -> str:
        return str(self.loop.watch.report())

    def _repr_mimebundle_(self, **options: Any) -> Any:
        bundle = self.widget._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        data["text/plain"] = repr(self)
        return bundle


def _set(widget: Any, value: str) -> None:
    """Set HTML only when it is new: every set replaces the subtree in the page."""
    if widget.value != value:
        widget.value = value
