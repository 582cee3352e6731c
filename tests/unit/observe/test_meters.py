"""Meters see what a step allocates, at rest and at its peak, and cost next to nothing."""

from __future__ import annotations

import time

import pytest
import torch

from workbench.hardware import Device
from workbench.observe import meters
from workbench.observe.meters import CpuMeter, CudaMeter, choose_meter, resident_bytes
from workbench.recipe import Recipe

MIB = 2**20


@pytest.fixture
def meter(monkeypatch):
    # However fragmented the heap of this test process is by now, every reading is taken.
    monkeypatch.setattr(meters, "COST_RATIO", 0.0)
    meter = CpuMeter()
    meter.start()
    yield meter
    meter.stop()


def test_bytes_at_rest_follow_tensors(meter):
    before = meter.measure_step()["allocated_bytes"]
    kept = torch.ones(20 * MIB // 4)
    time.sleep(0.02)
    grown = meter.measure_step()["allocated_bytes"]
    del kept
    time.sleep(0.02)
    after = meter.measure_step()["allocated_bytes"]
    assert grown - before == pytest.approx(20 * MIB, abs=MIB)
    assert after - before == pytest.approx(0, abs=MIB)


def test_the_peak_inside_a_step_is_seen_and_reset(meter):
    at_rest = meter.measure_step()["allocated_bytes"]
    tensor = torch.ones(30 * MIB // 4)
    time.sleep(0.1)
    del tensor
    peak = meter.measure_step()["peak_allocated_bytes"]
    assert peak - at_rest == pytest.approx(30 * MIB, abs=MIB)
    time.sleep(0.05)
    assert meter.measure_step()["peak_allocated_bytes"] - at_rest == pytest.approx(0, abs=MIB)


def test_an_expensive_reading_is_rationed(monkeypatch):
    calls = []

    def slow():
        calls.append(time.perf_counter())
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return 100

    monkeypatch.setattr(meters, "heap_reader", lambda: slow)
    meter = CpuMeter()
    meter.start()
    rows = []
    for _ in range(20):
        time.sleep(0.01)
        rows.append(meter.measure_step())
    meter.stop()
    assert len(calls) <= 3  # One by the first step, one or two by the sampler in 0.2 s; each costs 10 ms.
    assert "allocated_bytes" in rows[0]
    assert all("allocated_bytes" not in row for row in rows[1:])
    assert all("process_bytes" in row for row in rows)


def test_without_glibc_the_resident_set_stands_in(monkeypatch):
    monkeypatch.setattr(meters, "heap_reader", lambda: None)
    meter = CpuMeter()
    assert meter.counter == "resident bytes"
    assert meter.measure_step()["allocated_bytes"] == pytest.approx(resident_bytes(), rel=0.1)


def test_stopping_ends_the_thread():
    meter = CpuMeter()
    meter.start()
    thread = meter._thread
    meter.stop()
    assert not thread.is_alive()
    meter.stop()


def test_the_meter_follows_the_device():
    gpu = Device(name="GPU", kind="cuda", capacity_bytes=1)
    cpu = Device(name="CPU", kind="cpu", capacity_bytes=1)
    assert isinstance(choose_meter(Recipe(), gpu), CudaMeter)
    assert isinstance(choose_meter(Recipe(), cpu), CpuMeter)


def test_the_gpu_meter_reads_and_resets_the_allocator(monkeypatch):
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 9)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20)
    meter = CudaMeter()
    assert meter.measure_step() == {}
    meter.start()
    assert meter.measure_step() == {"allocated_bytes": 5, "peak_allocated_bytes": 9, "reserved_bytes": 20}
    assert len(resets) == 2
    meter.stop()
    assert meter.measure_step() == {}
