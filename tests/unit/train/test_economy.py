"""Rows say what a run costs and how busy the device is; a run that compresses activations says what that does."""

from __future__ import annotations

import dataclasses

import pytest

from workbench.recipe import Recipe
from workbench.train.telemetry import price_per_hour_usd

from ..components.tiny import CPU
from .parts import rows_of, small_recipe


def test_rows_have_cost_and_utilization(tiny) -> None:
    session = tiny(small_recipe(cost__price_per_hour_usd=3600.0)).start().wait(60)
    for row in session.log.of("step"):
        assert row["cost_usd"] == pytest.approx(row["elapsed_s"])
        assert 0 < row["utilization_fraction"] <= 1
        assert (row["micro_batch_size"], row["accumulation"]) == (2, 2)


def test_without_a_price_there_is_no_cost(tiny) -> None:
    session = tiny(small_recipe(training__max_steps=1)).start().wait(60)
    assert "cost_usd" not in session.log.of("step")[0]


def test_the_recipes_price_comes_before_the_tables() -> None:
    offered = dataclasses.replace(CPU, price_per_hour_usd=(2.0, 4.0))
    assert price_per_hour_usd(Recipe(), CPU) is None
    assert price_per_hour_usd(Recipe(), offered) == 2.0
    changes = {"cost.price_per_hour_usd": 1.5, "sharding.num_processes": 4}
    assert price_per_hour_usd(Recipe().with_changes(changes), offered) == 6.0


def test_the_error_of_compressed_gradients_is_measured_and_changes_nothing(tiny, monkeypatch) -> None:
    from workbench.train import engine

    def lengthen(run) -> None:
        run.data.train = rows_of(22, shortest=30, longest=60)  # Shorter ones are too small to be compressed.

    errors, losses = {}, {}
    for bits in ("8bit", "4bit"):
        recipe = small_recipe(training__activation_storage=bits, adapter__lora_dropout=0.2)
        session = tiny(recipe, run_dir=bits, prepare=lengthen).start().wait(60)
        errors[bits] = session.summary()["gradient_error"]
        losses[bits] = [row["loss"] for row in session.log.of("step")]
        assert any(f"in {bits[0]} bits" in one["message"] for one in session.log.of("log"))
    assert 0 < errors["8bit"] < 0.01 and 5 * errors["8bit"] < errors["4bit"] < 1
    assert tiny(small_recipe(), run_dir="full").start().wait(60).summary()["gradient_error"] is None
    monkeypatch.setattr(engine, "measure_gradient_error", lambda run, order: None)
    unmeasured = tiny(recipe, run_dir="again", prepare=lengthen).start().wait(60)
    assert [row["loss"] for row in unmeasured.log.of("step")] == losses["4bit"]
