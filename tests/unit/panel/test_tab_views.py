"""Views of the tabs without a browser: measuring a device, exports, and what makes room for a run."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import Cancelled, RunError
from workbench.export.export import ExportReport
from workbench.hardware import find_device
from workbench.panel.background import Background
from workbench.panel.chat_view import ChatView
from workbench.panel.export_view import exported, report_rows
from workbench.panel.measure_view import MeasureView
from workbench.panel.texts import Say

GRADE = {
    "num_bytes": 2048, "compression": 2.0, "perplexity": 11.0, "merged_perplexity": 10.0, "accuracy_fraction": 0.5,
    "merged_accuracy_fraction": 0.5, "mean_logit_difference": 0.1, "same_next_token_fraction": 0.9, "reader": "torch",
    "tokens_per_s": 30.0, "merged_tokens_per_s": 20.0, "num_rows": 4, "rows": "held-out rows", "num_tokens": 99,
}  # fmt: skip


@pytest.fixture
def background() -> Any:
    made = Background("test-tabs", builds_models=False)
    yield made
    made.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_measured_device_is_estimated_again_and_a_cancelled_one_is_not(
    background: Background, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    kinds, again, done = [], [], threading.Event()

    def calibrate(progress: Any, cancel: Any, *, kind: str) -> None:
        kinds.append(kind)
        if is_cancelled:
            raise Cancelled("by the user")

    monkeypatch.setattr("workbench.hardware.calibrate_device", calibrate)
    view = MeasureView(background, Say(), estimate_again=lambda: again.append(1))
    view.show(dataclasses.replace(find_device("Tesla T4"), is_emulated=False))
    assert "wb-hidden" not in view.box._dom_classes
    finish = view._done
    view._done = lambda outcome: (finish(outcome), done.set())  # type: ignore[method-assign]
    view.measure()
    assert done.wait(10)
    assert kinds == ["cuda"]
    assert again == ([] if is_cancelled else [1])
    assert ("Cancelled" in view._error.box.value) == is_cancelled
    view.show(find_device("Tesla T4"))
    assert "wb-hidden" in view.box._dom_classes, "a device of the table cannot be measured here"


def test_what_was_read_back_and_the_grade_become_rows() -> None:
    report = ExportReport("gguf-q8_0", Path("x"), 10, {"largest_difference": 0.0123456}, GRADE)
    rows = report_rows(report)
    assert rows[0] == ["largest difference", "0.01235"]
    assert ["perplexity", "11.000 (+10.00%)"] in rows
    assert report_rows(ExportReport("adapter", Path("x"), 10)) == []


def test_exports_of_a_run_are_found(tmp_path: Path) -> None:
    assert exported(tmp_path) == []
    (tmp_path / "exports" / "merged").mkdir(parents=True)
    (tmp_path / "exports" / "merged" / "weights").write_bytes(b"x" * 7)
    (tmp_path / "exports" / ".script.partial").mkdir()
    assert exported(tmp_path) == [("merged", tmp_path / "exports" / "merged", 7)]


def test_chat_releases_its_models_before_a_run_and_refuses_one_while_it_loads() -> None:
    from workbench.panel.tabs import Tabs

    tabs = Tabs.__new__(Tabs)
    tabs.chat = ChatView(Say(), rows=list)
    closed = []
    try:
        tabs.chat.chat = type("Loaded", (), {"close": lambda self: closed.append(1)})()
        tabs.make_room()
        assert closed == [1]
        assert tabs.chat.chat is None
        tabs.chat._working = "load"
        with pytest.raises(RunError, match="being loaded"):
            tabs.make_room()
    finally:
        tabs.chat.close()
