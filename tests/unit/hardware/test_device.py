"""Devices by name, with figures that are plausible."""

import pytest

from workbench.errors import DeviceError
from workbench.hardware import device_names, find_device, target_device
from workbench.recipe import Recipe
from workbench.units import GIB, MIB


@pytest.mark.parametrize("name", ["Tesla T4", "t4", "NVIDIA T4", "tesla-t4"])
def test_a_device_is_found_by_name_or_alias_however_it_is_written(name: str) -> None:
    assert find_device(name).name == "Tesla T4"


def test_short_names_work_where_one_row_fits() -> None:
    assert find_device("4090").name == "NVIDIA GeForce RTX 4090"
    assert find_device("L40S").name == "NVIDIA L40S"


def test_an_ambiguous_name_lists_the_candidates() -> None:
    with pytest.raises(DeviceError, match=r"Did you mean NVIDIA A100-SXM4-40GB, NVIDIA A100 80GB PCIe"):
        find_device("A100")


def test_an_unknown_name_lists_what_is_known() -> None:
    with pytest.raises(DeviceError, match="not in the device table"):
        find_device("abacus")


def test_a_smaller_capacity_can_be_asked_for() -> None:
    assert find_device("T4:10GiB").capacity_bytes == 10 * GIB
    with pytest.raises(DeviceError, match="not a size"):
        find_device("T4:lots")


@pytest.mark.parametrize("name", device_names())
def test_every_row_is_plausible(name: str) -> None:
    device = find_device(name)
    assert 4 * GIB < device.capacity_bytes < 300 * GIB
    assert 100e9 < device.bandwidth_bytes_per_s < 10e12
    assert device.flops_per_s["float16"] >= device.flops_per_s["float32"] > 1e12
    assert device.is_emulated and device.source == "table"
    if device.kind == "cuda":
        assert device.compute_capability is not None
        # bfloat16 came with Ampere; before it the flag of torch is true by emulation.
        assert device.bf16_native == (device.compute_capability >= (8, 0))
        assert 100 * MIB < device.context_bytes < GIB
    if device.price_per_hour_usd:
        assert 0.05 < device.price_per_hour_usd[0] <= device.price_per_hour_usd[1] < 30


def test_the_target_is_the_argument_then_the_recipe_then_this_machine() -> None:
    recipe = Recipe().with_changes({"hardware.emulate": "Tesla T4"})
    assert target_device(recipe, "NVIDIA L4").name == "NVIDIA L4"
    assert target_device(recipe).name == "Tesla T4"
    assert target_device(recipe, "cpu").kind == "cpu"
    assert not target_device(Recipe().with_changes({"hardware.device": "cpu"})).is_emulated


def test_the_context_of_a_t4_is_what_was_read_at_the_peak_of_training_runs() -> None:
    assert find_device("Tesla T4").context_bytes == pytest.approx(140.875 * MIB, rel=0.01)
