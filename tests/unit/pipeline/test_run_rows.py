"""The table of runs and the comparison say what the folders hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import RunFolderError
from workbench.pipeline.run_rows import (
    Prediction,
    compare_runs,
    continue_changes,
    list_run_rows,
    read_prediction,
    write_prediction,
)
from workbench.recipe import Recipe
from workbench.train.run_folder import RunFolder


def make_run(root: Path, name: str, rows: list[dict[str, float]], **changes: Any) -> Path:
    recipe = Recipe().with_changes({"model.name_or_path": "tiny-llama"} | changes)
    folder = RunFolder.create(recipe, root / name)
    folder.release()
    lines = [json.dumps({"step": index + 1, **row}) for index, row in enumerate(rows)]
    (folder.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder.path


STEPS = [{"loss": 3.0 - step, "step_s": seconds, "peak_allocated_bytes": peak}
         for step, (seconds, peak) in enumerate([(9.0, 50.0), (2.0, 80.0), (4.0, 60.0)])]  # fmt: skip


def test_a_row_holds_the_highest_peak_and_a_median_step_without_the_first(tmp_path: Path) -> None:
    write_prediction(make_run(tmp_path, "a", STEPS), Prediction(77.0, 2.5, "Tesla T4"))
    (row,) = list_run_rows(tmp_path)
    assert row.measured_peak_bytes == 80.0
    assert row.measured_step_s == 3.0
    assert row.predicted == Prediction(77.0, 2.5, "Tesla T4")
    assert row.summary.loss == 1.0


def test_new_steps_are_seen_in_the_next_look(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a", STEPS)
    assert list_run_rows(tmp_path)[0].measured_peak_bytes == 80.0
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "loss": 0.5, "step_s": 1.0, "peak_allocated_bytes": 99.0}) + "\n")
    assert list_run_rows(tmp_path)[0].measured_peak_bytes == 99.0


@pytest.mark.parametrize("text", ["", "{", '{"peak_bytes": "much"}', "[]"])
def test_a_damaged_prediction_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "prediction.json").write_text(text)
    assert read_prediction(tmp_path) is None


def test_only_settings_that_differ_are_compared(tmp_path: Path) -> None:
    one = make_run(tmp_path, "a", STEPS, **{"adapter.r": 4})
    two = make_run(tmp_path, "b", STEPS[:2], **{"adapter.r": 8, "training.max_steps": 7})
    found = compare_runs([one, two])
    assert found.settings == {"adapter.r": (4, 8), "training.max_steps": (-1, 7)}
    assert [list(values) for _, values in found.losses] == [[3.0, 2.0, 1.0], [3.0, 2.0]]


def test_one_run_alone_is_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="1 runs are given; a comparison takes 2 to 6"):
        compare_runs([make_run(tmp_path, "a", STEPS)])


def test_a_new_run_starts_from_the_adapter_of_the_same_model(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a", STEPS)
    with pytest.raises(RunFolderError, match="has saved no adapter"):
        continue_changes(folder)
    (folder / "adapter").mkdir()
    recipe = Recipe().with_changes(continue_changes(folder))
    assert recipe.adapter.name_or_path == str(folder / "adapter")
    assert recipe.model.name_or_path == "tiny-llama"
