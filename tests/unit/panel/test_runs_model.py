"""The table of runs as plain data, and the values that a comparison suggests."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.hardware import find_device
from workbench.panel.chat_view import render_answer
from workbench.panel.compare_view import read_values, suggested_values
from workbench.panel.measure_view import needs_measuring
from workbench.panel.runs_model import HEADER, RunsModel, cells_of
from workbench.panel.texts import Say
from workbench.pipeline.run_rows import Prediction, RunRow
from workbench.recipe import Recipe
from workbench.report.run_html import render_samples
from workbench.report.runs_html import prediction_rows, render_grid
from workbench.train.run_folder import RunSummary


def row(
    name: str, *, loss: float | None = 1.0, size: int = 10, started: float = 0.0, peak: float | None = 5.0
) -> RunRow:
    summary = RunSummary(
        name=name, path=Path("runs") / name, state="done", num_steps_done=4, loss=loss, eval_loss=None,
        model="org/tiny", data="data/rows.jsonl", method="lora", num_bytes=size, started_s=started, num_checkpoints=1,
    )  # fmt: skip
    return RunRow(summary, Prediction(2**30, 0.5, "cpu"), peak, 1.0)


ROWS = [row("b", loss=2.0, size=30, started=1.0), row("a", loss=None, size=10, started=3.0), row("c", started=2.0)]


@pytest.mark.parametrize(
    ("sort", "names"),
    [("Newest first", "acb"), ("Name", "abc"), ("Lowest loss", "cba"), ("Largest on disk", "bac")],
)
def test_rows_come_in_the_order_asked_for(sort: str, names: str) -> None:
    model = RunsModel(ROWS)
    model.sort = sort
    assert "".join(one.summary.name for one in model.rows) == names


def test_what_was_chosen_stays_chosen_while_it_is_there() -> None:
    model = RunsModel(ROWS)
    for name in ("c", "b"):
        model.choose(Path("runs") / name, True)
    model.set_rows(ROWS[:2])
    assert [one.summary.name for one in model.chosen] == ["b"]
    model.choose(Path("runs") / "b", False)
    assert model.chosen == []


def test_cells_are_those_of_the_header_in_the_panels_language() -> None:
    cells = cells_of(ROWS[0], Say("zh"))
    assert len(cells) == len(HEADER)
    assert cells == ["已完成", "tiny", "rows.jsonl", "4", "2.0000", "1 GiB", "5 B", "30 B"]


def test_predicted_and_measured_stand_below_each_other() -> None:
    rows = prediction_rows([ROWS[0], row("x", peak=None)])
    assert rows[2][1:] == ["0.00", "–"]
    assert rows[5][1:] == ["2.00", "2.00"]


@pytest.mark.parametrize(
    ("path", "text"), [("adapter.r", "16, 32, 64"), ("training.gradient_checkpointing", "off, on")]
)
def test_suggested_values_are_values_of_the_field(path: str, text: str) -> None:
    assert suggested_values(path, Recipe()) == text


def test_values_with_commas_are_kept_apart_by_semicolons() -> None:
    assert read_values("adapter.r", " 8, 16 ,") == ["8", "16"]
    assert read_values("adapter.target_modules", "q_proj, v_proj; all-linear") == ["q_proj, v_proj", "all-linear"]


def test_only_a_device_that_is_here_and_was_never_measured_asks_for_it() -> None:
    import dataclasses

    table = find_device("Tesla T4")
    here = dataclasses.replace(table, is_emulated=False)
    assert needs_measuring(here)
    assert not needs_measuring(table)
    assert not needs_measuring(None)
    assert not needs_measuring(dataclasses.replace(here, efficiency={"matmul": 0.5}))


def test_nothing_that_a_model_or_a_run_says_is_html() -> None:
    payload = "<img src=x onerror=alert(1)>"
    sample = {"step": 0, "samples": [{"prompt": payload, "wanted": payload, "answer": payload}]}
    shown = [
        render_answer("Base", payload, payload),
        render_samples([sample]),
        render_grid([payload], [[payload]], payload),
    ]
    for html in shown:
        assert "<img" not in html
        assert "&lt;img" in html
