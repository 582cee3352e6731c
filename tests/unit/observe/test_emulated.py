from __future__ import annotations

import dataclasses

import pytest
import torch

from workbench.hardware import find_device
from workbench.observe.emulated import EmulatedDevice, EmulatedMeter

T4 = find_device("Tesla T4")
MIB = 2**20
WORKSPACE = 2 * 8_519_680


def _card(room: int) -> object:
    return dataclasses.replace(T4, capacity_bytes=T4.context_bytes + room)


def test_real_storages_are_counted_as_blocks() -> None:
    with EmulatedDevice(T4, torch_version="2.13.0") as card:
        kept = torch.ones(MIB // 8)  # half a mebibyte
        gone = kept * 2
        assert card.stats().allocated == WORKSPACE + MIB
        del gone
        assert card.stats().allocated == WORKSPACE + MIB // 2
        view = kept[:10]
        assert card.stats().allocated == WORKSPACE + MIB // 2
        del kept, view
        assert card.stats().allocated == WORKSPACE


def test_backward_is_counted_too() -> None:
    with EmulatedDevice(T4) as card:
        weight = torch.ones(MIB // 4, requires_grad=True)
        (weight * weight).sum().backward()
        at_rest = card.stats().allocated
        assert card.stats().peak_allocated >= at_rest + MIB
        weight.grad = None
        assert card.stats().allocated == at_rest - MIB


def test_tensors_from_outside_are_adopted() -> None:
    weight = torch.ones(MIB // 4)
    with EmulatedDevice(T4) as card:
        before = card.stats().allocated
        result = weight + 1
        assert card.stats().allocated == before + 2 * MIB
        del result


def test_a_full_card_raises_what_cuda_raises() -> None:
    text = r"Tried to allocate 64\.00 MiB.*Emulated: Tesla T4"
    with pytest.raises(torch.OutOfMemoryError, match=text), EmulatedDevice(_card(40 * MIB)):
        torch.empty(64 * MIB, dtype=torch.uint8)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_meter_reports_and_resets_the_peak() -> None:
    meter = EmulatedMeter(T4)
    meter.start()
    try:
        big = torch.ones(MIB)
        del big
        first = meter.measure_step()
        second = meter.measure_step()
    finally:
        meter.stop()
    assert first["peak_allocated_bytes"] - first["allocated_bytes"] == 4 * MIB
    assert second["peak_allocated_bytes"] == second["allocated_bytes"] == first["allocated_bytes"]
    assert first["process_bytes"] == first["reserved_bytes"] + T4.context_bytes
    assert meter.measure_step() == {}
    assert torch._C._len_torch_dispatch_stack() == 0
