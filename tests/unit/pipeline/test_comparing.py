"""Comparing: variants from values, rows that survive a bad variant, and figures taken from the history."""

from __future__ import annotations

import math

import pytest

from workbench.errors import Cancelled, RecipeError
from workbench.events import Cancel
from workbench.observe.history import History
from workbench.pipeline.comparing import METHODS, ComparedRun, compare_recipes, measure_history, variants_over
from workbench.recipe import Recipe
from workbench.report.comparison import comparison_markdown, comparison_table, render_comparison

TINY = Recipe().with_changes({"model.name_or_path": "tiny-llama", "data.max_length": 64})


def test_every_combination_is_a_variant_with_values_of_the_fields_type() -> None:
    found = variants_over({"adapter.r": ["8", "16"], "training.gradient_checkpointing": ["true", "false"]})
    assert len(found) == 4
    assert found["adapter.r=8, training.gradient_checkpointing=True"] == {
        "adapter.r": 8,
        "training.gradient_checkpointing": True,
    }


def test_unknown_fields_and_a_flood_of_variants_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"adapter\.rr"):
        variants_over({"adapter.rr": ["8"]})
    with pytest.raises(RecipeError, match="more than 64 combinations"):
        variants_over({"adapter.r": list(range(1, 70))})


def test_a_variant_that_is_not_allowed_is_a_row_and_the_others_go_on() -> None:
    rows = compare_recipes(TINY, {"good": {}, "bad": {"adapter.r": 0}, "worse": {"adapter.target_modules": "nothing"}})
    assert [row.problem is None for row in rows] == [True, False, False]
    assert rows[0].estimate is not None and rows[0].estimate.memory.process_bytes > 0
    text = render_comparison([row.to_dict() for row in rows])
    assert "bad: adapter.r" in text and "worse: " in text


def test_the_methods_of_the_courses_differ_in_memory_as_they_teach() -> None:
    rows = compare_recipes(TINY.with_changes({"hardware.emulate": "Tesla T4"}), METHODS)
    peaks = {row.name: row.estimate.memory.peak_allocated_bytes for row in rows if row.estimate}
    assert peaks["full"] > peaks["LoRA"] > peaks["LoRA + checkpointing"]
    assert set(peaks) == set(METHODS)


def test_a_cancelled_comparison_ends() -> None:
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        compare_recipes(TINY, {"one": {}}, cancel=cancel)


def _history() -> History:
    history = History()
    for step in range(1, 11):
        history.append(
            {
                "step": step,
                "step_s": 9.0 if step <= 2 else 0.5,
                "num_tokens": 100,
                "loss": 10.0 - step,
                "peak_allocated_bytes": 1000 + step,
                "eval_loss": 4.5 if step == 10 else math.nan,
            }
        )
    return history


def test_measured_figures_leave_the_warm_up_out_and_price_the_tokens() -> None:
    recipe = Recipe().with_changes({"cost.price_per_hour_usd": 3.6})
    measured = measure_history(_history(), "runs/x", (1.0, 2.0), recipe)
    assert measured.step_s == 0.5 and measured.tokens_per_s == 200.0
    assert measured.peak_bytes == 1010 and measured.eval_loss == 4.5
    assert measured.first_loss == 8.5 and measured.last_loss == 0.5
    # 3.6 USD an hour are 0.001 USD a second; 1,000 tokens take 5 seconds.
    assert measured.cost_usd_per_1000_tokens == (pytest.approx(0.005), pytest.approx(0.005))


def test_tables_show_only_columns_with_values_and_escape_bars() -> None:
    rows = [
        ComparedRun("a|b", {}, measured=measure_history(_history(), "x", None, Recipe())).to_dict(),
        ComparedRun("c", {}, problem="no").to_dict(),
    ]
    header, cells = comparison_table(rows)
    assert "allocated (measured)" in header and "memory (estimated)" not in header
    assert len(cells) == 2 and all(len(row) == len(header) for row in cells)
    assert r"a\|b" in comparison_markdown(rows)
