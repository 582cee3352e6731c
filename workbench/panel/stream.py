"""Streaming plots: rows go to the page once, in binary, from one flusher thread; the page draws them.

The history is no synced trait. It is packed only when a page asks for the widget's state (display, reload, new tab,
saving), with at most 4,000 points per line, so that messages stay the same size however long the run is.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import anywidget
import ipywidgets as widgets
import numpy as np
import numpy.typing as npt
import traitlets

from ..events import LIVE_STATES
from ..report.charts import Series, render_line_chart
from ..units import GIB, KIB, MIB

Floats = npt.NDArray[np.float64]

FLUSH_INTERVAL_S = 0.22
HEARTBEAT_S = 2.0
MAX_SNAPSHOT_POINTS = 4000
SMOOTHING_STEPS = 25

# What is plotted. ``loss_smooth`` is made here; the rest are columns of the history.
PLOTS: tuple[dict[str, Any], ...] = (
    {
        "id": "loss",
        "title": "Loss",
        "unit": "",
        "series": [
            {"column": "loss", "label": "each step", "style": "faint", "colour": 0},
            {"column": "loss_smooth", "label": f"mean of {SMOOTHING_STEPS}", "style": "line", "colour": 0},
            {"column": "eval_loss", "label": "held out", "style": "dots", "colour": 1},
        ],
    },
    {
        "id": "memory",
        "title": "Memory",
        "unit": "bytes",
        "series": [
            {"column": "peak_allocated_bytes", "label": "peak", "style": "line", "colour": 0},
            {"column": "allocated_bytes", "label": "at rest", "style": "dashed", "colour": 1},
            {"column": "reserved_bytes", "label": "reserved", "style": "line", "colour": 2},
            {"column": "process_bytes", "label": "process", "style": "line", "colour": 3},
        ],
    },
    {
        "id": "grad_norm",
        "title": "Gradient norm",
        "unit": "",
        "series": [{"column": "grad_norm", "label": "before clipping", "style": "line", "colour": 0}],
    },
    {
        "id": "learning_rate",
        "title": "Learning rate",
        "unit": "",
        "zero": True,
        "series": [{"column": "learning_rate", "label": "now", "style": "line", "colour": 0}],
    },
    {
        "id": "tokens_per_s",
        "title": "Tokens per second",
        "unit": "rate",
        "zero": True,
        "series": [{"column": "tokens_per_s", "label": "real tokens", "style": "line", "colour": 0}],
    },
)
COLUMNS: tuple[str, ...] = ("step", *(line["column"] for plot in PLOTS for line in plot["series"]))
SCALES = {
    "bytes": [["GiB", GIB], ["MiB", MIB], ["KiB", KIB]],
    "rate": [["M", 1e6], ["k", 1e3]],
}


class Rows(Protocol):
    """What is needed of a history: how many rows there are, and a column with NaN where a value is missing."""

    def __len__(self) -> int: ...

    def column(self, name: str) -> Floats:
        """Return all rows of a column."""


def read_columns(history: Rows, first: int, count: int) -> dict[str, Floats]:
    """Return rows ``[first, first + count)`` of every plotted column, the smoothed loss included."""
    stop = first + count
    found = {name: history.column(name)[first:stop] for name in COLUMNS if name != "loss_smooth"}
    lead = max(0, first - SMOOTHING_STEPS + 1)
    found["loss_smooth"] = smooth(history.column("loss")[lead:stop], SMOOTHING_STEPS)[first - lead :]
    return found


def smooth(values: Floats, window: int) -> Floats:
    """Return the mean of the last ``window`` finite values at each row; NaN where the row itself has none."""
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (sums[ends] - sums[starts]) / (counts[ends] - counts[starts])
    return np.where(finite, means, np.nan)


def thin(x: Floats, y: Floats, max_points: int) -> tuple[Floats, Floats]:
    """Return the finite points, at most ``max_points`` of them, with the extremes of every stretch kept."""
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= max_points:
        return x, y
    size = math.ceil(len(x) / (max_points // 2))
    pad = -len(y) % size
    grid = np.concatenate((y, np.full(pad, y[-1]))).reshape(-1, size)
    starts = np.arange(len(grid)) * size
    chosen = np.stack((grid.argmin(axis=1) + starts, grid.argmax(axis=1) + starts), axis=1)
    index = np.unique(np.minimum(chosen, len(y) - 1))
    return x[index], y[index]


def pack_rows(history: Rows, run: str, first: int, count: int) -> tuple[dict[str, Any], bytes]:
    """Return the header and the buffer of an append message."""
    columns = read_columns(history, first, count)
    data = np.concatenate([np.asarray(columns[name], dtype="<f4") for name in COLUMNS]) if count else np.empty(0, "<f4")
    return {"kind": "append", "run": run, "first": first, "count": count, "columns": list(COLUMNS)}, data.tobytes()


def pack_snapshot(history: Rows | None, run: str) -> tuple[dict[str, Any], bytes]:
    """Return the header and the buffer of a whole history, thinned."""
    rows = len(history) if history is not None else 0
    series: list[list[Any]] = []
    parts: list[Floats] = []
    if history is not None and rows:
        columns = read_columns(history, 0, rows)
        for name in COLUMNS[1:]:
            x, y = thin(columns["step"], columns[name], MAX_SNAPSHOT_POINTS)
            if len(x):
                series.append([name, len(x)])
                parts += [x, y]
    data = np.concatenate(parts).astype("<f4") if parts else np.empty(0, "<f4")
    return {"kind": "snapshot", "run": run, "rows": rows, "series": series}, data.tobytes()


class StreamPlot(anywidget.AnyWidget):
    """The canvas plots. ``attach`` a history, then call ``flush`` from one thread."""

    _esm = Path(__file__).with_name("stream.js")
    snapshot = traitlets.Bytes(b"").tag(sync=True)
    plots = traitlets.List([]).tag(sync=True)
    lines = traitlets.Dict({}).tag(sync=True)
    scales = traitlets.Dict(SCALES).tag(sync=True)
    state = traitlets.Unicode("idle").tag(sync=True)

    def __init__(self) -> None:
        self._history: Rows | None = None
        self._run = ""
        self._sent = 0
        self._last_step = math.nan
        self._flush_lock = threading.Lock()
        super().__init__(plots=[dict(plot) for plot in PLOTS])
        self.on_msg(self._asked)

    def attach(self, history: Rows | None, run: str) -> None:
        """Show another run from its first row on."""
        with self._flush_lock:
            self._history, self._run = history, run
        self.send_snapshot()

    def set_level(self, plot: str, label: str, value: float | None) -> None:
        """Draw a level across a plot, e.g. the predicted peak; None removes it."""
        level = (
            [{"label": label, "value": float(value), "style": "dashed", "colour": "text"}] if value is not None else []
        )
        self.lines = {**self.lines, plot: level}

    def flush(self, *, heartbeat: bool = False) -> int:
        """Send everything new as one message; return how many rows. Without news only a heartbeat is sent."""
        with self._flush_lock:
            history = self._history
            if history is None:
                return 0
            count = len(history) - self._sent
            if count < 0 or self._was_rewritten(history):
                self._send_snapshot()
                return 0
            if count or heartbeat:
                header, data = pack_rows(history, self._run, self._sent, count)
                self.send(header, buffers=[data])
                self._remember(self._sent + count)
            return count

    def send_snapshot(self) -> None:
        """Send the whole history, thinned, to every page."""
        with self._flush_lock:
            self._send_snapshot()

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Fill the snapshot only when a page asks for everything."""
        state: dict[str, Any] = super().get_state(key=key, drop_defaults=drop_defaults)
        if key is None and getattr(self, "_history", None) is not None:
            header, data = pack_snapshot(self._history, self._run)
            text = json.dumps(header).encode()
            state["snapshot"] = struct.pack("<I", len(text)) + text + data
        return state

    def _send_snapshot(self) -> None:
        header, data = pack_snapshot(self._history, self._run)
        self.send(header, buffers=[data])
        self._remember(header["rows"])

    def _remember(self, rows: int) -> None:
        self._sent = rows
        self._last_step = (
            float(self._history.column("step")[rows - 1]) if self._history is not None and rows else math.nan
        )

    def _was_rewritten(self, history: Rows) -> bool:
        """A resumed run repeats the steps after its checkpoint: rows that were sent are then other ones."""
        return self._sent > 0 and float(history.column("step")[self._sent - 1]) != self._last_step

    def _asked(self, _widget: Any, content: Any, _buffers: Any) -> None:
        if isinstance(content, dict) and content.get("kind") == "resync":
            self.send_snapshot()


class SvgPlot:
    """The same plots drawn by the kernel into a core HTML widget, where third-party widgets do not load."""

    def __init__(self) -> None:
        self.widget = widgets.HTML()
        self._history: Rows | None = None
        self._levels: dict[str, list[tuple[str, float]]] = {}
        self._drawn = -1
        self.state = "idle"
        self._draw()

    def attach(self, history: Rows | None, run: str) -> None:
        """Show another run from its first row on."""
        self._history, self._drawn = history, -1
        self._draw()

    def set_level(self, plot: str, label: str, value: float | None) -> None:
        """Draw a level across a plot; None removes it."""
        self._levels[plot] = [(label, float(value))] if value is not None else []
        self._draw()

    def flush(self, *, heartbeat: bool = False) -> int:
        """Redraw when there are new rows; return how many."""
        rows = len(self._history) if self._history is not None else 0
        new = rows - max(self._drawn, 0)
        if rows != self._drawn:
            self._draw()
        return new

    def _draw(self) -> None:
        self._drawn = len(self._history) if self._history is not None else 0
        self.widget.value = render_history(self._history, self._levels)


def render_history(
    history: Rows | None, levels: dict[str, list[tuple[str, float]]] | None = None, max_points: int = 400
) -> str:
    """Return all plots of a history as static SVG in a grid."""
    rows = len(history) if history is not None else 0
    columns = read_columns(history, 0, rows) if history is not None and rows else {}
    charts = []
    for plot in PLOTS:
        series = []
        for line in plot["series"]:
            x, y = thin(columns["step"], columns[line["column"]], max_points) if columns else (np.empty(0), np.empty(0))
            if len(x):
                series.append(Series(line["label"], x.tolist(), y.tolist(), line["style"]))
        chart = render_line_chart(plot["title"], series, unit=plot["unit"], lines=(levels or {}).get(plot["id"], ()))
        charts.append(f'<figure class="wb-chart">{chart}</figure>')
    return f'<div class="wb-charts wb-charts-svg">{"".join(charts)}</div>'


class Flusher:
    """The one thread that carries news of a run to the page, 4 to 5 times a second. Training never waits for it."""

    def __init__(self, tick: Callable[[bool], None], state: Callable[[], str]) -> None:
        """Make a flusher.

        Args:
            tick: Called with True when a heartbeat is due; sends what is new.
            state: Returns the run's state; the thread ends one tick after it is no longer live.
        """
        self._tick = tick
        self._state = state
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="workbench-flusher", daemon=True)
        self.errors: list[BaseException] = []

    def start(self) -> Flusher:
        """Start the thread."""
        self._thread.start()
        return self

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def join(self, timeout_s: float = 5.0) -> None:
        """Wait for the thread to end by itself, which it does after a run's last rows."""
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _loop(self) -> None:
        ticks_per_beat = max(1, round(HEARTBEAT_S / FLUSH_INTERVAL_S))
        beat = 0
        while True:
            is_live = self._state() in LIVE_STATES
            try:
                self._tick(beat % ticks_per_beat == 0)
            except Exception as error:  # a closed comm or a bad row must not end the display of the run
                self.errors = [*self.errors[-4:], error]
            beat += 1
            if not is_live or self._stop.wait(FLUSH_INTERVAL_S):
                return


def is_foreign_front() -> bool:
    """Whether this kernel serves Colab or VS Code, where third-party widgets may not load."""
    import os
    import sys

    return "google.colab" in sys.modules or any(
        name in os.environ for name in ("VSCODE_PID", "VSCODE_CWD", "COLAB_GPU")
    )


def choose_plot(kind: str) -> StreamPlot | SvgPlot:
    """Return the plots for a front: ``"canvas"``, ``"svg"`` or ``"auto"``.

    Raises:
        ValueError: Another word.
    """
    allowed: Sequence[str] = ("auto", "canvas", "svg")
    if kind not in allowed:
        raise ValueError(f"plots={kind!r} is not allowed; allowed are {', '.join(allowed)}.")
    return SvgPlot() if kind == "svg" or (kind == "auto" and is_foreign_front()) else StreamPlot()
