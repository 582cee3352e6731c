"""Published rows become Recipes, or say why not; counters stay apart; grades count what they say they count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accuracy
from benchmarks.accuracy_rows import MappedRow, UnmappedRow, map_row, readings_of
from benchmarks.accuracy_rows.grade import Grade, count_verdicts, summarize, unmapped_reasons
from benchmarks.accuracy_rows.report import render_markdown, render_text
from benchmarks.accuracy_rows.row import grades_memory, source_name
from benchmarks.planners import run as planners
from workbench.hardware import find_device
from workbench.recipe import find_problems
from workbench.units import GIB, MIB

ROWS: list[dict[str, Any]] = json.loads(accuracy.ROWS.read_text(encoding="utf-8"))
BY_ID = {row["id"]: row for row in ROWS}


def mapped(key: str) -> MappedRow:
    result = map_row(BY_ID[key])
    assert isinstance(result, MappedRow)
    return result


def test_every_row_is_mapped_or_has_a_reason_and_none_is_lost() -> None:
    chosen, without = accuracy.split_rows(ROWS)
    assert len(chosen) + len(without) == len(ROWS)
    assert all(item.reason for item in without)
    assert sum(map(len, unmapped_reasons(without).values())) == len(without)


def test_nine_of_ten_reliable_single_gpu_memory_rows_are_mapped() -> None:
    strict = [row for row in ROWS if grades_memory(row) and row["completeness"] == "A" and row["n_gpus"] == 1]
    done = [row for row in strict if isinstance(map_row(row), MappedRow)]
    assert len(strict) > 100
    assert len(done) >= 0.9 * len(strict)


def test_every_mapped_row_is_a_recipe_its_device_accepts() -> None:
    chosen, _ = accuracy.split_rows(ROWS)
    for row in chosen:
        facts = find_device(row.device).facts(for_estimate=True)
        assert find_problems(row.recipe, facts) == [], row.row["id"]
        assert row.shape.batch_size == row.recipe.training.per_device_train_batch_size


def test_a_t4_row_says_fp16_without_autocast_and_its_counters_in_bytes() -> None:
    row = mapped("F0048")
    recipe = row.recipe
    assert (recipe.model.dtype, recipe.training.mixed_precision) == ("float16", "no")
    assert recipe.quantization.load_in_4bit and recipe.quantization.prepare_model_for_kbit_training
    assert recipe.training.max_grad_norm == 0.0
    assert recipe.hardware.torch_version == "2.14.0+cu130"
    assert row.script.keeps_outputs and row.script.sdpa_kernel == "efficient"
    found = {reading.counter: reading.num_bytes for reading in row.readings}
    assert found["process"] - found["reserved"] == found["context"] == round(140.875 * MIB)
    assert found["allocated"] == pytest.approx(1849.3 * MIB, rel=1e-4)


def test_units_are_what_the_row_says_and_an_ambiguous_one_is_not_graded() -> None:
    assert readings_of(BY_ID["M0001"])[0].num_bytes == round(16.69e9)
    ambiguous = next(row for row in ROWS if "ambiguous" in str(row["peak_mem_unit"]))
    assert readings_of(ambiguous) == ()


def test_a_peak_that_belongs_to_generation_is_not_graded_as_training() -> None:
    counters = [reading.counter for reading in mapped("M0553").readings]
    assert counters == ["reserved p99"]


def test_what_a_bfloat16_base_stores_is_not_taken_for_float16() -> None:
    assert mapped("M0179").recipe.model.dtype == "bfloat16"
    assert mapped("M0203").recipe.model.dtype == "float16"


def test_rows_of_several_gpus_and_of_unknown_adapters_say_so() -> None:
    several = next(row for row in ROWS if row["n_gpus"] == 8)
    result = map_row(several)
    assert isinstance(result, UnmappedRow)
    assert "8 GPUs" in result.reason
    other = map_row(BY_ID["M0585"])
    assert isinstance(other, UnmappedRow)
    assert "VERA" in other.reason


def grade(key: str, relative: float, verdict: str, *, finished: bool = True, contradicted: str = "") -> Grade:
    row = mapped(key)
    return Grade(
        row, {"allocated": ((1 + relative) * GIB, GIB)}, verdict, finished, 0.5 if finished else None, contradicted
    )


def test_a_summary_has_median_mean_worst_and_bias_of_one_source() -> None:
    grades = [grade("F0048", 0.01, "fits"), grade("F0049", -0.03, "fits"), grade("F0044", 0.05, "fits")]
    (summary,) = summarize(grades)
    assert summary.num_rows == 3
    assert summary.median == pytest.approx(0.03)
    assert summary.mean == pytest.approx(0.03)
    assert summary.bias == pytest.approx(0.01)
    assert (summary.worst, summary.worst_id) == (pytest.approx(0.05), "F0044")


def test_a_failed_run_called_fits_is_a_false_fit_and_tight_is_not() -> None:
    grades = [
        grade("M0353", 0.0, "fits", finished=False),
        grade("M0354", 0.0, "tight", finished=False),
        grade("M0351", 0.0, "does_not_fit"),
        grade("M0355", 0.0, "fits", contradicted="fits"),
    ]
    (count,) = count_verdicts(grades)
    assert (count.num_finished, count.num_failed) == (2, 2)
    assert (count.false_fits, count.false_misfits, count.tight) == (1, 1, 1)
    assert (count.clear, count.clear_called_fits) == (2, 1)
    assert (count.contradicted_fits, count.num_contradictable) == (1, 1)


def test_tables_name_every_source_and_every_reason() -> None:
    _, without = accuracy.split_rows(ROWS)
    grades = [grade("F0048", 0.01, "fits")]
    text, page = render_text(ROWS, grades, without, {}), render_markdown(ROWS, grades, without, {})
    for shown in (text, page):
        assert all(source_name(row) in shown for row in ROWS)
        assert all(item.reason in shown for item in without)
    assert "+1.0 % (F0048)" in page


def test_a_planner_that_does_not_install_is_listed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(planner: Any) -> Path:
        raise RuntimeError(f"{planner.name} does not install here: no network")

    monkeypatch.setattr(planners, "planner_python", refuse)
    figures = planners.run_planners([mapped("F0048"), mapped("M0111")])
    assert set(figures["fitcheck-llm"]) == {"F0048", "M0111"}
    assert "no network" in figures["fitcheck-llm"]["F0048"].reason
    assert figures["fitcheck-llm"]["F0048"].is_fitted and not figures["fitcheck-llm"]["M0111"].is_fitted
    assert not figures["canifinetune"]["F0048"].num_bytes
