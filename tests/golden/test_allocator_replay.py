"""Lives of blocks, replayed: from GPUs where records exist, and worked out by hand from the allocator's source.

``benchmarks/gpu_accuracy.py`` writes one JSON file a run below ``benchmarks/recorded/``; every file with events is
replayed here and has to give the peaks that torch reported, without a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_accuracy import replay_events
from workbench.estimate.allocator import AllocatorStats, CachingAllocator, OutOfCapacity

MIB = 2**20
RECORDED = sorted((Path(__file__).parents[2] / "benchmarks" / "recorded").glob("*.json"))


def _records() -> list[Any]:
    found = []
    for path in RECORDED:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("events"):
            found.append(pytest.param(record, id=path.stem))
    return found or [pytest.param(None, marks=pytest.mark.skip(reason="no GPU has recorded a run yet"), id="none")]


@pytest.mark.parametrize("record", _records())
def test_a_recorded_run_replays_to_the_peaks_that_torch_reported(record: dict[str, Any]) -> None:
    stats = replay_events(record["events"], expandable_segments=record["expandable_segments"])
    measured = record["measured"]
    assert stats.peak_allocated == pytest.approx(measured["peak_allocated_bytes"], rel=0.001)
    assert stats.peak_reserved == pytest.approx(measured["peak_reserved_bytes"], rel=0.02)


def test_events_are_replayed_by_address() -> None:
    """An address that is given, taken back and given again is two blocks."""
    events = [[1, 100, 3 * MIB], [1, 200, 5 * MIB], [0, 100, 3 * MIB], [1, 100, 3 * MIB // 2], [0, 999, 1]]
    stats = replay_events(events, expandable_segments=False)
    assert stats.peak_allocated == 8 * MIB
    assert stats.allocated == 13 * MIB // 2
    assert stats.reserved == 20 * MIB


# Each: capacity in MiB or None, steps ("name", bytes) to take and "-name" to give back, and what torch holds then:
# allocated, reserved, segments. Source of every number: c10/cuda/CUDACachingAllocator.cpp, rules named per case.
SCENARIOS: dict[str, tuple[int | None, list[tuple[str, int]], tuple[int, int, int]]] = {
    # get_allocation_size: small blocks share segments of 2 MiB; four of 512 KiB fill one, the fifth opens another.
    "small blocks fill a segment": (
        None,
        [(f"b{index}", 512 * 1024) for index in range(5)],
        (5 * MIB // 2, 4 * MIB, 2),
    ),
    # Pools do not mix: a free large segment of 20 MiB serves no block of 1 MiB.
    "pools do not mix": (None, [("a", 9 * MIB), ("-a", 0), ("b", MIB)], (MIB, 22 * MIB, 2)),
    # should_split of the large pool: what remains must exceed 1 MiB, else the block is handed out whole.
    "a small rest is not split off": (None, [("a", 12 * MIB), ("-a", 0), ("b", 11 * MIB)], (12 * MIB, 12 * MIB, 1)),
    # A whole segment is given back when the driver refuses, then the request is tried again.
    "a cached segment makes room": (
        30,
        [("a", 20 * MIB), ("-a", 0), ("b", 24 * MIB)],
        (24 * MIB, 24 * MIB, 1),
    ),
    # release_cached_blocks frees only segments that are one block: a split one stays, with its hole.
    "a hole under a small neighbour stays": (
        64,
        [("a", 8 * MIB), ("b", 8 * MIB), ("-a", 0), ("c", 40 * MIB)],
        (48 * MIB, 60 * MIB, 2),
    ),
    # Best fit, not first fit: 6 MiB goes into the segment of 8 that is free, not into that of 30.
    "the smallest hole that fits is taken": (
        None,
        [("a", 30 * MIB), ("b", 12 * MIB), ("-a", 0), ("-b", 0), ("c", 11 * MIB)],
        (12 * MIB, 42 * MIB, 2),
    ),
    # Merging: three blocks of one segment give one hole of 18 MiB, too large a request for any of them alone.
    "neighbours merge": (
        None,
        [("a", 6 * MIB), ("b", 6 * MIB), ("c", 6 * MIB), ("-a", 0), ("-c", 0), ("-b", 0), ("d", 18 * MIB)],
        (18 * MIB, 20 * MIB, 1),
    ),
}


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_a_scenario_ends_with_what_the_source_says(name: str) -> None:
    capacity, steps, expected = SCENARIOS[name]
    stats = _play(capacity, steps)
    assert (stats.allocated, stats.reserved, stats.num_segments) == expected


def test_what_no_freed_segment_can_serve_is_out_of_memory() -> None:
    """The hole of 8 MiB lies in a split segment, so that only 10 of 30 MiB are left for the driver to give."""
    with pytest.raises(OutOfCapacity) as caught:
        _play(30, [("a", 8 * MIB), ("b", 8 * MIB), ("-a", 0), ("c", 12 * MIB)])
    assert caught.value.num_bytes == 12 * MIB


def _play(capacity_mib: int | None, steps: list[tuple[str, int]]) -> AllocatorStats:
    allocator = CachingAllocator(None if capacity_mib is None else capacity_mib * MIB, is_compiled=False)
    blocks: dict[str, int] = {}
    for name, num_bytes in steps:
        if name.startswith("-"):
            allocator.free(blocks.pop(name[1:]))
        else:
            blocks[name] = allocator.malloc(num_bytes)
    return allocator.stats()
