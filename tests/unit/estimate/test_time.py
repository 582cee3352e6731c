from __future__ import annotations

import dataclasses

import pytest

from workbench.estimate import BatchShape, estimate_run
from workbench.estimate.shape import full_shape
from workbench.estimate.time import _Clocks, anchor_time
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


def test_a_gpu_waits_for_its_host_only_where_it_has_nothing_left_to_do() -> None:
    clocks = _Clocks()
    clocks.run(5.0, 1.0, 1)  # launched at 1, busy to 6
    clocks.run(5.0, 1.0, 1)  # launched at 2, waits for nothing
    assert (clocks.host_s, clocks.idle_s) == (2.0, 1.0)
    clocks.run(0.3, 1.0, 12)  # the device runs dry at 11 and ends with the last launch, at 14
    assert clocks.host_s == 14.0
    assert clocks.idle_s == pytest.approx(14.0 + 0.3 / 12 - 5.0 - 5.0 - 0.3)


def test_a_measured_host_takes_the_place_of_the_assumed_one() -> None:
    slow = dataclasses.replace(T4, overhead_s={"forward": 1e-3, "backward": 1e-3, "optimizer": 1e-3})
    assert estimate_run(TINY, slow).time.step_s > 5 * estimate_run(TINY, T4).time.step_s


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


def test_one_measured_step_anchors_every_figure() -> None:
    recipe = TINY.with_changes({"training.max_steps": 10, "cost.price_per_hour_usd": 100.0})
    predicted = estimate_run(recipe, CPU).time
    anchored = anchor_time(predicted, 2 * predicted.step_s)
    assert anchored.basis == "anchored"
    assert anchored.step_s == pytest.approx(sum(anchored.seconds_by_class.values()))
    assert anchored.total_s == pytest.approx(20 * predicted.step_s)
    assert anchored.tokens_per_s == pytest.approx(predicted.tokens_per_s / 2)
    assert anchored.cost_usd is not None and predicted.cost_usd is not None
    assert anchored.cost_usd[0] == pytest.approx(2 * predicted.cost_usd[0])
    assert anchored.interval_s[0] < anchored.step_s < anchored.interval_s[1]
    with pytest.raises(ValueError, match="finished step"):
        anchor_time(predicted, 0.0)


def test_a_cpu_that_emulates_bfloat16_is_named_with_how_much_it_costs() -> None:
    points = {f"matmul.{dtype}.{layout}": [(64.0, 64.0, 64.0, rate)] for layout in ("nn", "nt", "tn")
              for dtype, rate in (("float32", 8e10), ("bfloat16", 4e9))}  # fmt: skip
    slow = dataclasses.replace(CPU, rates=points)
    recipe = TINY.with_changes({"training.mixed_precision": "bf16"})
    assert any("bfloat16 take 20 times" in note for note in estimate_run(recipe, slow).notes)
    assert not any("bfloat16" in note for note in estimate_run(TINY, slow).notes)
    assert estimate_run(recipe, slow).time.step_s > 3 * estimate_run(TINY, slow).time.step_s


def test_measured_curves_decide_the_time_of_a_cpu() -> None:
    plain = estimate_run(TINY, CPU).time
    slow = dataclasses.replace(CPU, rates={"silu": [(1.0, 1e7)]}, overhead_s={"backward": 1e-3})
    step = estimate_run(TINY, slow).time
    assert step.seconds_by_class["elementwise"] > 1.5 * plain.seconds_by_class["elementwise"]
    assert step.seconds_by_class["launch"] > 10 * plain.seconds_by_class["launch"]
    assert step.seconds_by_class["matmul"] == pytest.approx(plain.seconds_by_class["matmul"])
