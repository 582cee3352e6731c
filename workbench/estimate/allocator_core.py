"""The rules of torch's CUDA caching allocator on plain integer arrays, so that numba can compile them.

The same functions run uncompiled (slowly), so that a test can hold the two equal. Blocks, segments and free lists live
in arrays that ``CachingAllocator`` owns; a block is a row number.

Source:
    c10/cuda/CUDACachingAllocator.cpp of torch 2.9 to 2.14 (native backend): ``round_size``, ``get_pool``,
    ``get_free_block``, ``get_allocation_size``, ``should_split``, ``free_block``, ``release_cached_blocks``,
    ``try_allocate_expandable_block``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20  # up to here: small pool
SMALL_BUFFER = 2 << 20  # segment of the small pool
LARGE_BUFFER = 20 << 20  # segment of requests below MIN_LARGE
MIN_LARGE = 10 << 20
ROUND_LARGE = 2 << 20

# Where addresses start; they go down from here. The order of addresses decides between free blocks of one size. Of the
# 20 published runs on a T4 that load without quantization, going up gives 10 the reserved bytes that were read and
# errors of up to 9 %, going down 17, and 8 MiB of error. Source: fitcheck-llm 0.3.1, data/measurements.
TOP_ADDR = 1 << 60

# Columns of the block table.
ADDR, SIZE, SEGMENT, PREV, NEXT, STATE, REQUESTED, POOL = range(8)
FREE, USED, UNMAPPED, DEAD = 0, 1, 2, 3
# Columns of the segment table.
SEG_SIZE, SEG_POOL = 0, 1
# Statistics.
ALLOCATED, REQUESTED_BYTES, RESERVED, PEAK_ALLOCATED, PEAK_REQUESTED, PEAK_RESERVED, NUM_SEGMENTS, RETRIES = range(8)
# Counters.
NUM_BLOCKS, NEXT_ADDR, FREE_ROWS, LIST_SMALL, LIST_LARGE = range(5)
# Settings.
CAPACITY, EXPANDABLE, MAX_SPLIT, ROUNDUP = range(4)

NONE = -1
OUT_OF_MEMORY = -2
FULL_TABLE = -3


def round_size(size: int, roundup: int) -> int:
    """Return the block size of a request: at least 512 bytes, a multiple of 512, or of a fraction of a power of two."""
    if size < MIN_BLOCK:
        return MIN_BLOCK
    if roundup > 1 and size > MIN_BLOCK * roundup:
        floor = 1
        while floor * 2 <= size:
            floor *= 2
        if floor == size:
            return size
        step = floor // roundup
        if step == 0:
            return size
        return (size + step - 1) // step * step
    return (size + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK


def segment_size(size: int) -> int:
    """Return what is asked of the driver for a block of ``size`` bytes when nothing cached fits."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE:
        return LARGE_BUFFER
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


def _find(blocks: Any, free: Any, count: int, size: int, addr: int) -> int:
    """Return the first place in a free list whose block is not below (size, addr)."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        row = free[middle]
        if blocks[row, SIZE] < size or (blocks[row, SIZE] == size and blocks[row, ADDR] < addr):
            low = middle + 1
        else:
            high = middle
    return low


def _insert(blocks: Any, free: Any, counters: Any, row: int) -> None:
    pool = blocks[row, POOL]
    count = counters[LIST_SMALL + pool]
    place = _find(blocks, free[pool], count, blocks[row, SIZE], blocks[row, ADDR])
    for index in range(count, place, -1):
        free[pool, index] = free[pool, index - 1]
    free[pool, place] = row
    counters[LIST_SMALL + pool] = count + 1


def _remove(blocks: Any, free: Any, counters: Any, row: int) -> None:
    pool = blocks[row, POOL]
    _remove_at(free, counters, pool, _place_of(blocks, free, counters, row))


def _place_of(blocks: Any, free: Any, counters: Any, row: int) -> int:
    pool = blocks[row, POOL]
    return _find(blocks, free[pool], counters[LIST_SMALL + pool], blocks[row, SIZE], blocks[row, ADDR])


def _remove_at(free: Any, counters: Any, pool: int, place: int) -> None:
    count = counters[LIST_SMALL + pool]
    for index in range(place, count - 1):
        free[pool, index] = free[pool, index + 1]
    counters[LIST_SMALL + pool] = count - 1


def _put_below(blocks: Any, free: Any, pool: int, place: int, row: int) -> None:
    """Let ``row``, which is smaller, stand for the block at ``place``: only what lies between the two moves."""
    target = _find(blocks, free[pool], place, blocks[row, SIZE], blocks[row, ADDR])
    for index in range(place, target, -1):
        free[pool, index] = free[pool, index - 1]
    free[pool, target] = row


def _put_above(blocks: Any, free: Any, counters: Any, pool: int, place: int, row: int) -> None:
    """Let ``row``, which has grown, stand for the block at ``place``."""
    last = counters[LIST_SMALL + pool] - 1
    size, addr = blocks[row, SIZE], blocks[row, ADDR]
    index = place
    while index < last:
        other = free[pool, index + 1]
        if blocks[other, SIZE] > size or (blocks[other, SIZE] == size and blocks[other, ADDR] > addr):
            break
        free[pool, index] = other
        index += 1
    free[pool, index] = row


def _new_row(blocks: Any, spare: Any, counters: Any) -> int:
    if counters[FREE_ROWS] > 0:
        counters[FREE_ROWS] -= 1
        return spare[counters[FREE_ROWS]]
    row = counters[NUM_BLOCKS]
    counters[NUM_BLOCKS] += 1
    return row


def _drop_row(blocks: Any, spare: Any, counters: Any, row: int) -> None:
    blocks[row, STATE] = DEAD
    spare[counters[FREE_ROWS]] = row
    counters[FREE_ROWS] += 1


def _split(blocks: Any, spare: Any, counters: Any, row: int, size: int, state: int) -> int:
    """Cut ``row`` to ``size`` bytes; return the row of the rest, which gets ``state``."""
    rest = _new_row(blocks, spare, counters)
    blocks[rest, ADDR] = blocks[row, ADDR] + size
    blocks[rest, SIZE] = blocks[row, SIZE] - size
    blocks[rest, SEGMENT] = blocks[row, SEGMENT]
    blocks[rest, POOL] = blocks[row, POOL]
    blocks[rest, STATE] = state
    blocks[rest, REQUESTED] = 0
    blocks[rest, PREV] = row
    blocks[rest, NEXT] = blocks[row, NEXT]
    if blocks[row, NEXT] != NONE:
        blocks[blocks[row, NEXT], PREV] = rest
    blocks[row, NEXT] = rest
    blocks[row, SIZE] = size
    return rest


def _join(blocks: Any, spare: Any, counters: Any, left: int, right: int) -> None:
    """Make ``right`` part of ``left``."""
    blocks[left, SIZE] += blocks[right, SIZE]
    after = blocks[right, NEXT]
    blocks[left, NEXT] = after
    if after != NONE:
        blocks[after, PREV] = left
    _drop_row(blocks, spare, counters, right)


def _best_fit(blocks: Any, free: Any, counters: Any, settings: Any, pool: int, size: int) -> int:
    """Return the place in the free list of the block to take, or NONE."""
    count = counters[LIST_SMALL + pool]
    place = _find(blocks, free[pool], count, size, -1)
    if place == count:
        return NONE
    row = free[pool, place]
    if settings[EXPANDABLE]:
        # A block before unmapped space counts as large as it can grow.
        best = blocks[row, SIZE]
        after = blocks[row, NEXT]
        if after != NONE and blocks[after, STATE] == UNMAPPED:
            best += blocks[after, SIZE]
        for index in range(place + 1, count):
            other = free[pool, index]
            grown = blocks[other, SIZE]
            after = blocks[other, NEXT]
            if after != NONE and blocks[after, STATE] == UNMAPPED:
                grown += blocks[after, SIZE]
            if grown >= best:
                break
            place, best = index, grown
        return place
    limit = settings[MAX_SPLIT]
    if size < limit and blocks[row, SIZE] >= limit:
        return NONE
    if size >= limit and blocks[row, SIZE] >= size + LARGE_BUFFER:
        return NONE
    return place


def _reserve(stats: Any, num_bytes: int) -> None:
    stats[RESERVED] += num_bytes
    stats[PEAK_RESERVED] = max(stats[PEAK_RESERVED], stats[RESERVED])


def _new_segment(blocks: Any, spare: Any, counters: Any, settings: Any, stats: Any, pool: int, size: int) -> int:
    wanted = segment_size(size)
    if stats[RESERVED] + wanted > settings[CAPACITY]:
        return NONE
    row = _new_row(blocks, spare, counters)
    # The driver hands addresses out from high to low, so that of two holes of one size the later segment's is taken.
    addr = counters[NEXT_ADDR] - wanted
    counters[NEXT_ADDR] = addr - SMALL_BUFFER  # A gap: segments never merge.
    blocks[row, ADDR] = addr
    blocks[row, SIZE] = wanted
    blocks[row, SEGMENT] = addr
    blocks[row, PREV] = NONE
    blocks[row, NEXT] = NONE
    blocks[row, STATE] = FREE
    blocks[row, POOL] = pool
    _reserve(stats, wanted)
    stats[NUM_SEGMENTS] += 1
    return row


def _grow(blocks: Any, free: Any, spare: Any, counters: Any, settings: Any, stats: Any, pool: int, size: int) -> int:
    """Map pages of the expandable segment of ``pool`` until a block of ``size`` bytes exists; NONE when full."""
    tail = NONE
    for row in range(counters[NUM_BLOCKS]):
        if blocks[row, STATE] == UNMAPPED and blocks[row, POOL] == pool:
            have = blocks[row, SIZE]
            before = blocks[row, PREV]
            if before != NONE and blocks[before, STATE] == FREE:
                have += blocks[before, SIZE]
            if have >= size and (tail == NONE or blocks[row, ADDR] < blocks[tail, ADDR]):
                tail = row
    if tail == NONE:  # The first block of this pool: an address range far larger than the memory.
        tail = _new_row(blocks, spare, counters)
        span = settings[CAPACITY] + settings[CAPACITY] // 8 + 2 * LARGE_BUFFER
        counters[NEXT_ADDR] -= span
        blocks[tail, ADDR] = counters[NEXT_ADDR]
        blocks[tail, SIZE] = span
        blocks[tail, SEGMENT] = blocks[tail, ADDR]
        blocks[tail, PREV] = NONE
        blocks[tail, NEXT] = NONE
        blocks[tail, STATE] = UNMAPPED
        blocks[tail, POOL] = pool
        stats[NUM_SEGMENTS] += 1
    before = blocks[tail, PREV]
    has_before = before != NONE and blocks[before, STATE] == FREE
    page = SMALL_BUFFER if pool == 0 else LARGE_BUFFER
    missing = size - (blocks[before, SIZE] if has_before else 0)
    mapped = min((missing + page - 1) // page * page, blocks[tail, SIZE])
    if stats[RESERVED] + mapped > settings[CAPACITY]:
        return NONE
    _reserve(stats, mapped)
    if mapped < blocks[tail, SIZE]:
        _split(blocks, spare, counters, tail, mapped, UNMAPPED)
    blocks[tail, STATE] = FREE
    if has_before:
        _remove(blocks, free, counters, before)
        _join(blocks, spare, counters, before, tail)
        return before
    return tail


def release_cached(blocks: Any, free: Any, spare: Any, counters: Any, settings: Any, stats: Any) -> None:
    """Give cached memory back to the driver: whole free segments, or whole free pages of expandable ones."""
    for pool in range(2):
        index = 0
        while index < counters[LIST_SMALL + pool]:
            row = free[pool, index]
            if settings[EXPANDABLE]:
                index += _unmap(blocks, free, spare, counters, stats, row, pool)
            elif blocks[row, PREV] == NONE and blocks[row, NEXT] == NONE:
                _remove(blocks, free, counters, row)
                stats[RESERVED] -= blocks[row, SIZE]
                stats[NUM_SEGMENTS] -= 1
                _drop_row(blocks, spare, counters, row)
            else:
                index += 1


def _unmap(blocks: Any, free: Any, spare: Any, counters: Any, stats: Any, row: int, pool: int) -> int:
    """Unmap the whole pages inside a free block; return 0 when the block left the free list, 1 when it stays."""
    page = SMALL_BUFFER if pool == 0 else LARGE_BUFFER
    base = blocks[row, SEGMENT]
    first = (blocks[row, ADDR] - base + page - 1) // page * page + base
    end = (blocks[row, ADDR] + blocks[row, SIZE] - base) // page * page + base
    if end <= first:
        return 1
    _remove(blocks, free, counters, row)
    middle = row
    if first > blocks[row, ADDR]:
        middle = _split(blocks, spare, counters, row, first - blocks[row, ADDR], FREE)
        _insert(blocks, free, counters, row)
    if end < blocks[middle, ADDR] + blocks[middle, SIZE]:
        rest = _split(blocks, spare, counters, middle, end - first, FREE)
        _insert(blocks, free, counters, rest)
    blocks[middle, STATE] = UNMAPPED
    stats[RESERVED] -= end - first
    after, before = blocks[middle, NEXT], blocks[middle, PREV]
    if after != NONE and blocks[after, STATE] == UNMAPPED:
        _join(blocks, spare, counters, middle, after)
    if before != NONE and blocks[before, STATE] == UNMAPPED:
        _join(blocks, spare, counters, before, middle)
    return 0


def malloc(blocks: Any, free: Any, spare: Any, counters: Any, settings: Any, stats: Any, num_bytes: int) -> int:
    """Return the row of a block for ``num_bytes``, or OUT_OF_MEMORY, or FULL_TABLE (the tables must be enlarged)."""
    if counters[NUM_BLOCKS] + 4 >= blocks.shape[0]:
        return FULL_TABLE
    size = round_size(num_bytes, settings[ROUNDUP])
    pool = 0 if size <= SMALL_SIZE else 1
    place = _best_fit(blocks, free, counters, settings, pool, size)
    if place != NONE:
        row = free[pool, place]
    else:
        row = NONE
        for attempt in range(2):
            if settings[EXPANDABLE]:
                row = _grow(blocks, free, spare, counters, settings, stats, pool, size)
            else:
                row = _new_segment(blocks, spare, counters, settings, stats, pool, size)
            if row != NONE or attempt == 1:
                break
            stats[RETRIES] += 1
            release_cached(blocks, free, spare, counters, settings, stats)
        if row == NONE:
            return OUT_OF_MEMORY
    rest = blocks[row, SIZE] - size
    if pool == 0 or settings[EXPANDABLE]:
        splits = rest >= MIN_BLOCK
    else:
        splits = size < settings[MAX_SPLIT] and rest > SMALL_SIZE
    if splits:
        remainder = _split(blocks, spare, counters, row, size, FREE)
        if place != NONE:
            _put_below(blocks, free, pool, place, remainder)
        else:
            _insert(blocks, free, counters, remainder)
    elif place != NONE:
        _remove_at(free, counters, pool, place)
    blocks[row, STATE] = USED
    blocks[row, REQUESTED] = num_bytes
    stats[ALLOCATED] += blocks[row, SIZE]
    stats[REQUESTED_BYTES] += num_bytes
    stats[PEAK_ALLOCATED] = max(stats[PEAK_ALLOCATED], stats[ALLOCATED])
    stats[PEAK_REQUESTED] = max(stats[PEAK_REQUESTED], stats[REQUESTED_BYTES])
    return row


def release(blocks: Any, free: Any, spare: Any, counters: Any, stats: Any, row: int) -> None:
    """Free a block and merge it with free neighbours."""
    stats[ALLOCATED] -= blocks[row, SIZE]
    stats[REQUESTED_BYTES] -= blocks[row, REQUESTED]
    blocks[row, STATE] = FREE
    before, after = blocks[row, PREV], blocks[row, NEXT]
    joins_before = before != NONE and blocks[before, STATE] == FREE
    joins_after = after != NONE and blocks[after, STATE] == FREE
    if not joins_before and not joins_after:
        _insert(blocks, free, counters, row)
        return
    if joins_before and joins_after:
        _remove(blocks, free, counters, after)
    place = _place_of(blocks, free, counters, before if joins_before else after)
    if joins_after:
        _join(blocks, spare, counters, row, after)
    if joins_before:
        _join(blocks, spare, counters, before, row)
        row = before
    _put_above(blocks, free, counters, blocks[row, POOL], place, row)


def replay(
    blocks: Any, free: Any, spare: Any, counters: Any, settings: Any, stats: Any, events: Any, sizes: Any, rows: Any,
    allocated: Any, reserved: Any, start: int,
) -> int:  # fmt: skip
    """Run events from ``start``; return how many ran. It stops early when the tables are full or memory is.

    Args:
        blocks, free, spare, counters, settings, stats: State of the allocator.
        events: Tokens (births) and ``~token`` (deaths).
        sizes: Bytes by token.
        rows: Block by token, filled here.
        allocated: Allocated bytes after each event, filled here.
        reserved: Reserved bytes after each event, filled here.
        start: First event.
    """
    for index in range(start, events.shape[0]):
        event = events[index]
        if event >= 0:
            row = malloc(blocks, free, spare, counters, settings, stats, sizes[event])
            if row < 0:
                return index
            rows[event] = row
        else:
            release(blocks, free, spare, counters, stats, rows[~event])
        allocated[index] = stats[ALLOCATED]
        reserved[index] = stats[RESERVED]
    return events.shape[0]


_PARTS = (
    round_size, segment_size, _find, _insert, _place_of, _remove_at, _remove, _put_below, _put_above, _new_row,
    _drop_row, _split, _join, _best_fit, _reserve, _new_segment, _grow, _unmap, release_cached, malloc, release, replay,
)  # fmt: skip


_COMPILING = threading.Lock()


def compiled() -> dict[str, Callable[..., Any]]:
    """Return the public functions compiled by numba; the machine code is kept beside the module or in numba's cache."""
    with _COMPILING:  # Two threads that compile at once would each compile everything.
        return _compiled()


@functools.cache
def _compiled() -> dict[str, Callable[..., Any]]:
    import types

    import numba

    names: dict[str, Any] = dict(globals())
    for function in _PARTS:
        # A copy whose globals are the compiled ones, so that this module's own functions stay plain Python.
        copy = types.FunctionType(function.__code__, names, function.__name__)
        names[function.__name__] = numba.njit(cache=True, nogil=True)(copy)
    return {name: names[name] for name in ("malloc", "release", "release_cached", "replay")}


def empty_tables(num_blocks: int) -> tuple[Any, Any, Any]:
    """Return ``(blocks, free lists, spare rows)`` with room for ``num_blocks`` blocks."""
    return (
        np.zeros((num_blocks, 8), dtype=np.int64),
        np.zeros((2, num_blocks), dtype=np.int64),
        np.zeros(num_blocks, dtype=np.int64),
    )
