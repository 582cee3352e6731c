"""What is reserved and not used, with its cause; the smallest device that survives, in an estimate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench.estimate import estimate_run, with_smallest_capacity
from workbench.estimate.allocator import CachingAllocator
from workbench.estimate.fragmentation import Fragmentation, find_fragmentation
from workbench.hardware import find_device
from workbench.recipe import Recipe
from workbench.units import MIB

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


def _found(events: list[int], sizes_mib: list[int], phase: str = "forward") -> tuple[Fragmentation, Any]:
    """Replay events of storages in one phase of step 2 and judge them."""
    sizes = np.array(sizes_mib, dtype=np.int64) * MIB
    allocator, handles = CachingAllocator(is_compiled=False), {}
    allocated, reserved = [], []
    for event in events:
        if event >= 0:
            handles[event] = allocator.malloc(int(sizes[event]))
        else:
            allocator.free(handles.pop(~event))
        allocated.append(allocator.stats().allocated)
        reserved.append(allocator.stats().reserved)
    tape = SimpleNamespace(operator_names=["aten.mm"], operators=[0] * len(sizes), phase_names=["load", "forward"])
    schedule: Any = SimpleNamespace(
        events=np.array(events), sizes=sizes, sources=np.arange(len(sizes)),
        phases=np.full(len(events), tape.phase_names.index(phase)),
        stretches=[SimpleNamespace(begin=0, end=len(events), step=1)],
        life=SimpleNamespace(tape=tape, sources=np.arange(len(sizes))),
    )  # fmt: skip
    return find_fragmentation(schedule, np.array(allocated), np.array(reserved)), allocator.stats()


def test_holes_that_hold_no_request_are_named() -> None:
    # Two segments of 40 MiB are free; 60 MiB fit into neither.
    found, stats = _found([0, 1, ~0, ~1, 2], [40, 40, 60])
    assert found.num_bytes == stats.reserved - stats.allocated == 80 * MIB
    assert found.cause == (
        "aten.mm in forward of step 2 asked for 60 MiB while 80 MiB lay free in pieces of which none is as large, "
        "so that the allocator took a new segment."
    )


def test_a_segment_larger_than_its_request_is_named() -> None:
    found, _ = _found([0, 1], [40, 2])  # 2 MiB come from a segment of 20
    assert found.num_bytes == 18 * MIB
    assert "asked for 2 MiB while only 0 B lay free, so that the allocator took a segment of 20 MiB" in found.cause


def test_what_the_peak_fills_later_is_not_unused() -> None:
    found, _ = _found([0, 1, ~0, ~1, 2, 3, 4], [40, 40, 60, 40, 40])
    assert found == Fragmentation(0, "")


def test_an_estimate_has_both_and_the_number_beside_a_toggle_waits_for_neither() -> None:
    recipe, device = Recipe().with_changes({"model.config": CONFIG}), find_device("Tesla T4")
    estimate = estimate_run(recipe, device)
    memory = with_smallest_capacity(estimate, recipe, device).memory
    assert estimate.memory.smallest_capacity_bytes is None
    assert memory.smallest_capacity_bytes is not None
    least = memory.smallest_capacity_bytes - device.context_bytes
    assert memory.peak_allocated_bytes <= least <= memory.peak_reserved_bytes
    assert 0 < memory.fragmentation_bytes < memory.peak_reserved_bytes
    assert memory.fragmentation_cause


@pytest.mark.parametrize("changes", [{"phases.steps": [3, 4]}])
def test_the_smallest_capacity_of_phases_is_that_of_the_most_needing(changes: dict[str, Any]) -> None:
    recipe, device = Recipe().with_changes({"model.config": CONFIG}), find_device("Tesla T4")
    several = recipe.with_changes(changes)
    whole = with_smallest_capacity(estimate_run(several, device), several, device).memory
    alone = with_smallest_capacity(estimate_run(recipe, device), recipe, device).memory
    assert whole.smallest_capacity_bytes == alone.smallest_capacity_bytes


def test_a_cpu_has_neither() -> None:
    recipe = Recipe().with_changes({"model.config": CONFIG, "hardware.device": "cpu"})
    memory = with_smallest_capacity(estimate_run(recipe), recipe).memory
    assert (memory.smallest_capacity_bytes, memory.fragmentation_bytes, memory.fragmentation_cause) == (None, 0, "")
