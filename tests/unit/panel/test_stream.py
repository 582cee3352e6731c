"""The kernel's side of the streaming plots: what is sent, when, and how big it is."""

from __future__ import annotations

import json
import struct
import threading
from typing import Any

import numpy as np
import pytest

from workbench.observe.history import History
from workbench.panel.stream import (
    COLUMNS,
    MAX_SNAPSHOT_POINTS,
    SMOOTHING_STEPS,
    Flusher,
    StreamPlot,
    SvgPlot,
    choose_plot,
    pack_snapshot,
    read_columns,
    render_history,
    smooth,
)


def fill(history: History, first: int, last: int) -> None:
    for step in range(first, last + 1):
        history.append({"step": step, "loss": 3.0 - step * 1e-3, "allocated_bytes": 1e9, "learning_rate": 1e-4})


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = StreamPlot()
    made.sent = []
    monkeypatch.setattr(made, "send", lambda content, buffers=None: made.sent.append((content, bytes(buffers[0]))))
    return made


def unpack_rows(message: tuple[dict[str, Any], bytes]) -> dict[str, np.ndarray]:
    header, data = message
    table = np.frombuffer(data, "<f4").reshape(len(header["columns"]), header["count"])
    return dict(zip(header["columns"], table, strict=True))


def test_each_row_travels_once(plot: Any) -> None:
    history = History()
    plot.attach(history, "run")
    fill(history, 1, 3)
    assert plot.flush() == 3
    assert plot.flush() == 0
    fill(history, 4, 4)
    assert plot.flush() == 1
    kinds = [(header["kind"], header.get("first"), header.get("count")) for header, _ in plot.sent]
    assert kinds == [("snapshot", None, None), ("append", 0, 3), ("append", 3, 1)]
    rows = unpack_rows(plot.sent[1])
    assert rows["step"].tolist() == [1, 2, 3]
    assert np.isnan(rows["grad_norm"]).all(), "what was not measured is NaN, never 0"


def test_messages_do_not_grow_with_the_run(plot: Any) -> None:
    history = History()
    fill(history, 1, 20_000)
    plot.attach(history, "run")
    fill(history, 20_001, 20_010)
    plot.flush()
    assert len(plot.sent[-1][1]) == 10 * 4 * len(COLUMNS)
    lines = 4  # loss, its mean, memory at rest, learning rate
    assert len(plot.sent[0][1]) <= lines * MAX_SNAPSHOT_POINTS * 2 * 4


def test_heartbeat_without_rows_is_small(plot: Any) -> None:
    plot.attach(History(), "run")
    plot.flush(heartbeat=True)
    header, data = plot.sent[-1]
    assert (header["kind"], header["count"], data) == ("append", 0, b"")


def test_rows_that_a_resumed_run_repeats_are_sent_anew(plot: Any) -> None:
    other = History()
    fill(other, 1, 100)
    plot.attach(other, "run")
    other.append({"step": 81, "loss": 9.0})
    plot.flush()
    header, _ = plot.sent[-1]
    assert (header["kind"], header["rows"]) == ("snapshot", 81)


def test_a_page_that_asks_gets_the_whole_history(plot: Any) -> None:
    history = History()
    fill(history, 1, 50)
    plot.attach(history, "run")
    assert plot.snapshot == b"", "the trait itself stays empty: it must not be synced with every change"
    state = plot.get_state()
    (length,) = struct.unpack_from("<I", state["snapshot"])
    header = json.loads(state["snapshot"][4 : 4 + length])
    assert header["rows"] == 50
    assert dict(map(tuple, header["series"]))["loss"] == 50
    assert plot.get_state("lines") == {"lines": {}}


def test_a_resync_request_is_answered_with_a_snapshot(plot: Any) -> None:
    history = History()
    plot.attach(history, "run")
    fill(history, 1, 5)
    plot._asked(plot, {"kind": "resync", "rows": 2}, [])
    assert plot.sent[-1][0]["rows"] == 5
    plot._asked(plot, {"kind": "something else"}, [])
    assert len(plot.sent) == 2


def test_smoothing_is_the_same_in_parts_and_whole() -> None:
    history = History()
    random = np.random.default_rng(0)
    for step in range(1, 201):
        history.append({"step": step, "loss": None if step % 17 == 0 else random.normal()})
    whole = read_columns(history, 0, 200)["loss_smooth"]
    parts = np.concatenate([read_columns(history, first, 8)["loss_smooth"] for first in range(0, 200, 8)])
    np.testing.assert_allclose(parts, whole, rtol=1e-9)
    assert np.isnan(whole[16])


def test_smoothing_is_a_trailing_mean() -> None:
    values = np.arange(100.0)
    found = smooth(values, SMOOTHING_STEPS)
    assert found[0] == 0
    assert found[99] == pytest.approx(values[100 - SMOOTHING_STEPS :].mean())


def test_snapshot_of_nothing() -> None:
    assert pack_snapshot(None, "run") == ({"kind": "snapshot", "run": "run", "rows": 0, "series": []}, b"")


def test_svg_plots_follow_the_history() -> None:
    history = History()
    plot = SvgPlot()
    assert "no values yet" in plot.widget.value
    plot.attach(history, "run")
    fill(history, 1, 30)
    assert plot.flush() == 30
    first = plot.widget.value
    assert "<svg" in first
    assert "Loss" in first
    assert plot.flush() == 0
    plot.set_level("memory", "predicted peak", 2 * 2**30)
    assert "predicted peak: 2 GiB" in plot.widget.value


def test_static_picture_of_a_long_run_stays_small() -> None:
    history = History()
    fill(history, 1, 50_000)
    assert len(render_history(history)) < 60_000


def test_plots_are_chosen_by_front(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VSCODE_PID", "VSCODE_CWD", "COLAB_GPU"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(choose_plot("auto"), StreamPlot)
    monkeypatch.setenv("VSCODE_PID", "1")
    assert isinstance(choose_plot("auto"), SvgPlot)
    assert isinstance(choose_plot("canvas"), StreamPlot)
    with pytest.raises(ValueError, match="allowed are auto, canvas, svg"):
        choose_plot("png")


def test_flusher_ends_after_one_last_tick() -> None:
    states = iter(["running", "running", "done"])
    beats: list[bool] = []
    flusher = Flusher(beats.append, lambda: next(states)).start()
    flusher.join()
    assert not flusher.is_alive
    assert len(beats) == 3
    assert beats[0] is True


def test_flusher_survives_a_failing_tick() -> None:
    ended = threading.Event()
    calls: list[int] = []

    def tick(heartbeat: bool) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("comm is closed")
        ended.set()

    flusher = Flusher(tick, lambda: "done" if len(calls) else "running").start()
    assert ended.wait(5)
    flusher.join()
    assert [str(error) for error in flusher.errors] == ["comm is closed"]
