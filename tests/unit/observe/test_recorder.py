"""The recorder: files, half-written lines, full disks."""

from __future__ import annotations

import json
import math
import os

import pytest

from workbench.events import Event
from workbench.observe import recorder as recorder_module
from workbench.observe.history import History
from workbench.observe.recorder import Recorder, encode


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def _step(step, **values):
    return Event("step", {"step": step, "loss": 1.0 / step, **values})


def test_steps_events_and_findings_go_to_their_files(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.on_event(_step(1))
    recorder.on_event(Event("progress", {"stage": "load"}))
    recorder.on_event(Event("finding", {"summary": "<b>x</b>"}, time_s=5.0))
    recorder.on_event(Event("state", {"state": "done"}))
    assert _lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]
    assert [line["kind"] for line in _lines(tmp_path / "events.jsonl")] == ["finding", "state"]
    finding = {"time_s": 5.0, "kind": "finding", "data": {"summary": "<b>x</b>"}}
    assert _lines(tmp_path / "findings.jsonl") == [finding]
    assert recorder.history.column("loss").tolist() == [1.0]


def test_lines_are_held_back_for_half_a_second_but_not_over_a_change_of_state(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(recorder_module.time, "monotonic", lambda: now[0])
    recorder, path = Recorder(tmp_path), tmp_path / "metrics.jsonl"
    recorder.on_event(_step(1))
    for step in range(2, 10):
        now[0] += 0.05
        recorder.on_event(_step(step))
    assert len(_lines(path)) == 1
    now[0] += 0.2
    recorder.on_event(_step(10))
    assert len(_lines(path)) == 10
    recorder.on_event(_step(11))
    assert len(_lines(path)) == 10
    recorder.on_event(Event("state", {"state": "paused"}))
    assert len(_lines(path)) == 11


def test_non_finite_values_make_valid_json_and_come_back(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.on_event(_step(1, grad_norm=math.inf, eval_loss=math.nan))
    recorder.flush()
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)["grad_norm"] == "Infinity"
    assert History.from_folder(tmp_path).column("grad_norm")[0] == math.inf
    nested = {"a": [1.0, -math.inf], "b": {"c": math.nan}}
    assert json.loads(encode(nested)) == {"a": [1.0, "-Infinity"], "b": {"c": "NaN"}}


def test_a_half_line_of_a_killed_process_does_not_swallow_the_next(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    recorder = Recorder(tmp_path)
    assert len(recorder.history) == 1
    recorder.on_event(_step(2))
    recorder.flush()
    assert History.from_folder(tmp_path).column("step").tolist() == [1, 2]


def test_a_full_disk_raises_nothing_leaves_no_half_line_and_is_made_up_for(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path)
    recorder.on_event(_step(1))
    recorder.flush()
    real_write = os.write

    def full(handle, data):
        real_write(handle, bytes(data)[:7])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder_module.os, "write", full)
    recorder.on_event(_step(2))
    recorder.flush()
    assert recorder.write_error.errno == 28
    assert _lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]
    monkeypatch.setattr(recorder_module.os, "write", real_write)
    recorder.flush()
    assert recorder.write_error is None
    assert [line["step"] for line in _lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_folder_that_vanished_ends_nothing(tmp_path):
    recorder = Recorder(tmp_path / "gone")
    recorder.on_event(_step(1))
    recorder.on_event(Event("state", {"state": "done"}))
    assert isinstance(recorder.write_error, FileNotFoundError)
    assert len(recorder.history) == 1


def test_all_steps_are_on_disk_before_a_checkpoint_is_written(tmp_path):
    recorder = Recorder(tmp_path)
    for step in range(1, 6):
        recorder.on_event(Event("step", {"step": step, "loss": 1.0}))
    recorder.on_event(Event("progress", {"stage": "save", "done": 0, "total": 1, "message": ""}))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
