from __future__ import annotations

import dataclasses

import pytest

from workbench.estimate import BatchShape, estimate_run
from workbench.estimate.shape import full_shape
from workbench.hardware import Device, find_device
from workbench.recipe import Recipe

TINY = Recipe().with_changes({"model.name_or_path": "tiny-llama", "data.max_length": 64, "evaluation.split": "none"})
T4 = find_device("Tesla T4")
CPU = Device(
    name="CPU", kind="cpu", capacity_bytes=2**34, flops_per_s={"float32": 1e11}, bandwidth_bytes_per_s=1e10,
    launch_s=5e-6, source="this machine", is_emulated=False,
)  # fmt: skip


def test_classes_add_up_to_the_step() -> None:
    step = estimate_run(TINY, T4).time
    assert sum(step.seconds_by_class.values()) == pytest.approx(step.step_s)
    assert step.interval_s[0] < step.step_s < step.interval_s[1]
    assert step.tokens_per_s == pytest.approx(8 * 64 / step.step_s)
    assert step.samples_per_s == pytest.approx(8 / step.step_s)


def test_operations_of_the_linear_layers_are_counted() -> None:
    """A full fine-tuning step computes at least 6 operations for each weight of a product and token."""
    recipe = TINY.with_changes({"adapter.method": "none", "training.gradient_accumulation_steps": 1})
    estimate = estimate_run(recipe, T4)
    tokens = 2 * 64
    assert estimate.time.flops == pytest.approx(6 * estimate.num_parameters * tokens, rel=0.15)


def test_recomputation_costs_about_a_third() -> None:
    recipe = TINY.with_changes({"adapter.method": "none"})
    plain = estimate_run(recipe, T4).time.flops
    again = estimate_run(recipe.with_changes({"training.gradient_checkpointing": True}), T4).time.flops
    assert 1.1 < again / plain < 4 / 3 + 0.01


def test_a_slower_device_takes_longer_in_proportion() -> None:
    slow = dataclasses.replace(CPU, flops_per_s={"float32": 0.5e11}, bandwidth_bytes_per_s=0.5e10, launch_s=10e-6)
    assert estimate_run(TINY, slow).time.step_s == pytest.approx(2 * estimate_run(TINY, CPU).time.step_s)


def test_the_host_is_the_floor_of_a_gpu() -> None:
    patient = dataclasses.replace(T4, launch_s=1e-3)
    step = estimate_run(TINY, patient).time
    assert step.seconds_by_class["launch"] > 0.9 * step.step_s


def test_the_mean_batch_decides_the_time_and_the_longest_the_memory() -> None:
    full = full_shape(TINY)
    short = BatchShape(full.batch_size, full.length, full.length / 2, full.length / 4, False, "data", 1000)
    first, second = estimate_run(TINY, CPU, shape=full), estimate_run(TINY, CPU, shape=short)
    assert second.memory.peak_allocated_bytes == first.memory.peak_allocated_bytes
    assert second.time.step_s < first.time.step_s
    assert second.time.num_steps == 125
    assert second.time.total_s == pytest.approx(125 * second.time.step_s)


def test_cost_of_a_run_of_known_length() -> None:
    recipe = TINY.with_changes({"training.max_steps": 36, "cost.price_per_hour_usd": 100.0})
    step = estimate_run(recipe, CPU).time
    assert step.cost_usd == pytest.approx((step.step_s, step.step_s))
    assert estimate_run(TINY, CPU).time.cost_usd is None


def test_the_basis_says_where_rates_come_from() -> None:
    assert estimate_run(TINY, T4).time.basis == "table"
    measured = dataclasses.replace(T4, efficiency={"matmul.float16.large": 0.5, "elementwise": 0.9})
    assert estimate_run(TINY, measured).time.basis == "calibrated"
