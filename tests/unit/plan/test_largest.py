from __future__ import annotations

import dataclasses

import pytest

from workbench.errors import Cancelled, DeviceError
from workbench.estimate import estimate_run
from workbench.events import Cancel
from workbench.hardware import find_device
from workbench.plan import largest_batch, largest_length, largest_model, which_device
from workbench.recipe import Recipe
from workbench.units import MIB

TINY = Recipe().with_changes({"model.name_or_path": "tiny-llama", "data.max_length": 128, "evaluation.split": "none"})
SMALL = dataclasses.replace(find_device("Tesla T4"), capacity_bytes=500 * MIB)


def verdict(**changes: object) -> str:
    return estimate_run(
        TINY.with_changes({key.replace("__", "."): value for key, value in changes.items()}), SMALL
    ).memory.verdict


def test_the_next_batch_does_not_surely_fit_and_the_effective_batch_stays() -> None:
    largest = largest_batch(TINY, SMALL)
    assert largest.value > 8
    assert verdict(training__per_device_train_batch_size=largest.value) == "fits"
    assert verdict(training__per_device_train_batch_size=largest.value + 1) != "fits"
    assert TINY.with_changes(largest.changes).training.effective_batch_size == TINY.training.effective_batch_size
    assert largest.changes == {
        "training.per_device_train_batch_size": 8,
        "training.gradient_accumulation_steps": 1,
    }
    assert f"{largest.value + 1} would need" in largest.limit
    assert largest.num_estimates == len(largest.tried) <= 14


def test_the_next_length_does_not_surely_fit() -> None:
    largest = largest_length(TINY, SMALL)
    assert largest.value % 64 == 0
    assert verdict(data__max_length=largest.value) == "fits"
    assert verdict(data__max_length=largest.value + 64) != "fits"
    assert largest.changes == {"data.max_length": largest.value}


def test_a_length_is_bounded_by_the_models_positions() -> None:
    roomy = dataclasses.replace(SMALL, capacity_bytes=1000 * 1024 * MIB)
    largest = largest_length(TINY, roomy)
    assert largest.limit.endswith("tokens are the most that the model has positions for.")
    assert largest.value == max(tried.value for tried in largest.tried)


def test_nothing_fits() -> None:
    none = dataclasses.replace(SMALL, capacity_bytes=100 * MIB)
    largest = largest_batch(TINY, none)
    assert largest.value is None
    assert largest.changes == {}
    assert "1 would need" in largest.limit


def test_the_largest_model_fits_and_larger_ones_were_tried() -> None:
    recipe = TINY.with_changes({"quantization.load_in_4bit": True})
    device = dataclasses.replace(SMALL, capacity_bytes=1600 * MIB)
    largest = largest_model(recipe, device, budget=10)
    assert largest.value is not None
    estimate = estimate_run(recipe.with_changes(largest.changes), device)
    assert estimate.memory.verdict == "fits"
    order = [tried.value for tried in largest.tried]
    above = largest.tried[order.index(largest.value) + 1 :]
    assert above
    assert all(tried.verdict != "fits" for tried in above)
    assert largest.num_estimates <= 10


def test_devices_that_fit_come_first_the_cheapest_per_token_before_the_others() -> None:
    recipe = TINY.with_changes({"training.mixed_precision": "bf16", "cost.price_per_hour_usd": 100.0})
    names = ["Tesla T4", "NVIDIA L4", "NVIDIA A100-SXM4-80GB", "NVIDIA L4:200MiB"]
    table = which_device(recipe, names=names)
    assert [choice.verdict for choice in table.choices] == ["fits", "fits", "does_not_fit", None]
    assert "bfloat16" in table.choices[-1].problem
    prices = [choice.cost_usd_per_1000_tokens[0] for choice in table.choices[:2] if choice.cost_usd_per_1000_tokens]
    assert prices == sorted(prices)
    assert max(prices) < 0.01  # the table's prices, not the 100 USD of one device
    for choice in table.choices[:2]:
        estimate = estimate_run(
            recipe.with_changes({"hardware.emulate": choice.name, "cost.price_per_hour_usd": None}),
            find_device(choice.name),
        )
        assert choice.process_bytes == estimate.memory.process_bytes
        assert choice.cost_usd_per_1000_tokens == estimate.time.cost_usd_per_1000_tokens
    assert table.cheapest is table.choices[0]
    assert table.smallest is not None
    assert table.smallest.name == "NVIDIA L4"
    assert table.fastest is not None
    assert table.fastest.step_s == min(choice.step_s for choice in table.fitting)


def test_the_capacity_behind_a_name_stays_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.plan.devices.device_names", lambda: ["Tesla T4", "NVIDIA L4"])
    table = which_device(TINY.with_changes({"hardware.emulate": "t4:100MiB"}))
    assert {choice.name: choice.verdict for choice in table.choices} == {
        "NVIDIA L4": "fits", "Tesla T4:100MiB": "does_not_fit",
    }  # fmt: skip
    assert table.choices[-1].capacity_bytes == 100 * 2**20


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(DeviceError, match="no such card"):
        which_device(TINY, names=["no such card"])


def test_cancel() -> None:
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        largest_batch(TINY, SMALL, cancel=cancel)
