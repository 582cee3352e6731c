"""The allocator's rules with numbers worked out by hand from c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import random

import numpy as np
import pytest

from workbench.estimate.allocator import CachingAllocator, OutOfCapacity, workspace_bytes

MIB = 2**20


def _allocator(capacity: int | None = None, **options: object) -> CachingAllocator:
    return CachingAllocator(capacity, is_compiled=False, **options)  # type: ignore[arg-type]  # options by name


def test_blocks_are_rounded_up_to_512_bytes() -> None:
    allocator = _allocator()
    allocator.malloc(1)
    allocator.malloc(513)
    stats = allocator.stats()
    assert (stats.allocated, stats.requested, stats.reserved) == (512 + 1024, 514, 2 * MIB)


@pytest.mark.parametrize(
    ("num_bytes", "segment"),
    [
        (MIB, 2 * MIB),  # the small pool reaches up to 1 MiB
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
    ],
)
def test_segment_sizes(num_bytes: int, segment: int) -> None:
    allocator = _allocator()
    allocator.malloc(num_bytes)
    assert allocator.stats().reserved == segment


def test_a_rest_of_up_to_one_mebibyte_is_not_split_off_a_large_block() -> None:
    allocator = _allocator()
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(19 * MIB)  # the rest is 1 MiB, not more: the whole block is handed out
    assert allocator.stats().allocated == 20 * MIB
    allocator = _allocator()
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(19 * MIB - 512)
    assert allocator.stats().allocated == 19 * MIB - 512


def test_the_best_fit_is_taken_and_neighbours_merge() -> None:
    allocator = _allocator()
    first, second, third = (allocator.malloc(4 * MIB) for _ in range(3))  # 12 of one segment of 20 MiB
    allocator.free(first)
    allocator.malloc(3 * MIB - 512)  # fits the hole of 4 MiB better than the rest of 8 MiB
    assert allocator.stats().reserved == 20 * MIB
    allocator.free(second)
    allocator.free(third)
    allocator.malloc(16 * MIB)  # holes of 1, 4, 4 and 8 MiB have merged
    assert allocator.stats().reserved == 20 * MIB


def test_freed_memory_stays_reserved_until_the_cache_is_emptied() -> None:
    allocator = _allocator()
    allocator.free(allocator.malloc(30 * MIB))
    kept = allocator.malloc(512)
    assert allocator.stats().reserved == 32 * MIB
    allocator.empty_cache()
    assert allocator.stats().reserved == 2 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.stats().reserved == 0
    assert allocator.stats().peak_reserved == 32 * MIB


def test_cached_segments_are_given_back_before_memory_runs_out() -> None:
    allocator = _allocator(capacity=50 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(40 * MIB)
    stats = allocator.stats()
    assert (stats.reserved, stats.num_retries) == (40 * MIB, 1)


def test_a_split_segment_cannot_be_given_back() -> None:
    allocator = _allocator(capacity=50 * MIB)
    whole = allocator.malloc(30 * MIB)
    allocator.free(whole)
    allocator.malloc(2 * MIB)
    with pytest.raises(OutOfCapacity) as caught:
        allocator.malloc(40 * MIB)
    assert caught.value.num_bytes == 40 * MIB
    assert allocator.stats().reserved == 30 * MIB


def test_expandable_segments_grow_by_pages_and_leave_no_holes() -> None:
    allocator = _allocator(expandable_segments=True)
    blocks = [allocator.malloc(30 * MIB) for _ in range(3)]
    assert allocator.stats().reserved == 100 * MIB  # 90 MiB in pages of 20 MiB
    for block in blocks:
        allocator.free(block)
    allocator.malloc(95 * MIB)
    assert allocator.stats().reserved == 100 * MIB
    plain = _allocator()
    for block in [plain.malloc(30 * MIB) for _ in range(3)]:
        plain.free(block)
    plain.malloc(95 * MIB)
    assert plain.stats().reserved == 90 * MIB + 96 * MIB


def test_expandable_segments_give_whole_pages_back() -> None:
    allocator = _allocator(capacity=100 * MIB, expandable_segments=True)
    first = allocator.malloc(50 * MIB)
    allocator.malloc(30 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.stats().reserved == 40 * MIB  # pages 0 and 1 are gone, page 2 is shared with the second block


def test_max_split_size_keeps_small_requests_out_of_large_blocks() -> None:
    allocator = _allocator(max_split_size_bytes=32 * MIB)
    allocator.free(allocator.malloc(64 * MIB))
    allocator.malloc(16 * MIB)
    assert allocator.stats().reserved == 64 * MIB + 16 * MIB


def test_roundup_divisions() -> None:
    allocator = _allocator(roundup_power2_divisions=4)
    allocator.malloc(5 * MIB)  # between 4 and 8 MiB in steps of 1 MiB
    allocator.malloc(5 * MIB + 1)
    assert allocator.stats().allocated == 5 * MIB + 6 * MIB


def test_zero_bytes_make_no_block() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        _allocator().malloc(0)


@pytest.mark.parametrize("expandable", [False, True])
def test_compiled_and_plain_rules_agree(expandable: bool) -> None:
    rng = random.Random(1)
    events, sizes, live = [], [], []
    for _ in range(3000):
        if live and rng.random() < 0.48:
            events.append(~live.pop(rng.randrange(len(live))))
        else:
            live.append(len(sizes))
            events.append(len(sizes))
            sizes.append(rng.choice([40, 700, 90_000, MIB + 9, 7 * MIB, 33 * MIB]))
    results = []
    for is_compiled in (False, True):
        allocator = CachingAllocator(900 * MIB, expandable_segments=expandable, is_compiled=is_compiled)
        try:
            allocator.replay(np.array(events), np.array(sizes))
            failed = None
        except OutOfCapacity as error:
            failed = error.index
        results.append((allocator.stats(), failed))
    assert results[0] == results[1]


def test_replay_and_single_calls_agree() -> None:
    sizes = [3 * MIB, 900, 12 * MIB, 5 * MIB]
    events = [0, 1, 2, ~0, 3, ~2]
    replayed = _allocator()
    allocated, reserved = replayed.replay(np.array(events), np.array(sizes))
    called, blocks = _allocator(), {}
    for index, event in enumerate(events):
        if event >= 0:
            blocks[event] = called.malloc(sizes[event])
        else:
            called.free(blocks[~event])
        assert (allocated[index], reserved[index]) == (called.stats().allocated, called.stats().reserved)


def test_tables_grow_with_the_number_of_blocks() -> None:
    allocator = _allocator()
    blocks = [allocator.malloc(512) for _ in range(5000)]
    assert allocator.stats().allocated == 5000 * 512
    for block in blocks:
        allocator.free(block)
    assert allocator.stats().allocated == 0


def test_workspaces_by_card_and_version() -> None:
    assert workspace_bytes((8, 0), "2.10.0") == [8_519_680, 8_519_680]
    assert workspace_bytes((9, 0), "2.10.0+cu130") == [32 * MIB, 32 * MIB]
    assert workspace_bytes((12, 0), "2.10.0") == [8_519_680, 8_519_680]
    assert workspace_bytes((12, 0), "2.14.1") == [32 * MIB, 32 * MIB]
