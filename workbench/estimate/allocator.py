"""CachingAllocator: a replay of torch's CUDA caching allocator, block by block."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import allocator_core as core

# Blocks the tables start with; they grow when a run needs more.
START_BLOCKS = 4096
NO_LIMIT = 2**62


@dataclass(frozen=True)
class AllocatorStats:
    """Counters as ``torch.cuda.memory_stats`` names them, in bytes.

    Attributes:
        allocated, requested, reserved: Now.
        peak_allocated, peak_requested, peak_reserved: High-water marks.
        num_segments: Segments held.
        num_retries: Times cached memory was given back because the driver had no more.
    """

    allocated: int
    requested: int
    reserved: int
    peak_allocated: int
    peak_requested: int
    peak_reserved: int
    num_segments: int
    num_retries: int


class OutOfCapacity(Exception):  # noqa: N818  # not an error of the program: the answer to "does it fit"
    """The device has no room for a block, also after cached memory was given back.

    Attributes:
        num_bytes: The request that failed.
        index: Index of its event in a replay, else None.
    """

    def __init__(self, num_bytes: int, index: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.index = index
        super().__init__(f"No room for {num_bytes} bytes.")


class CachingAllocator:
    """The native backend of torch's CUDA allocator on one stream.

    Args:
        capacity_bytes: What the driver can give in all; None for no limit.
        expandable_segments: As in ``PYTORCH_CUDA_ALLOC_CONF``.
        max_split_size_bytes: Blocks of this size and above are not split; None splits all.
        roundup_power2_divisions: Requests are rounded up to this fraction of a power of two; 0 turns it off.
        is_compiled: Use numba. Compiling takes seconds once per machine; a few hundred events are faster without.

    Example:
        >>> allocator = CachingAllocator(is_compiled=False)
        >>> block = allocator.malloc(1000)
        >>> allocator.stats().allocated, allocator.stats().reserved
        (1024, 2097152)
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        expandable_segments: bool = False,
        max_split_size_bytes: int | None = None,
        roundup_power2_divisions: int = 0,
        is_compiled: bool = True,
    ) -> None:
        self._blocks, self._free, self._spare = core.empty_tables(START_BLOCKS)
        self._counters = np.zeros(8, dtype=np.int64)
        self._counters[core.NEXT_ADDR] = core.TOP_ADDR
        capacity = NO_LIMIT // 4 if capacity_bytes is None else capacity_bytes
        split = NO_LIMIT if max_split_size_bytes is None else max_split_size_bytes
        self._settings = np.array([capacity, int(expandable_segments), split, roundup_power2_divisions], dtype=np.int64)
        self._stats = np.zeros(8, dtype=np.int64)
        self._is_compiled = is_compiled

    def malloc(self, num_bytes: int) -> int:
        """Take a block; returns a handle for ``free``.

        Raises:
            OutOfCapacity: There is no room.
            ValueError: ``num_bytes`` is not positive; torch makes no block for 0 bytes.
        """
        if num_bytes <= 0:
            raise ValueError(f"num_bytes is {num_bytes}; a block has at least 1 byte.")
        row = core.FULL_TABLE
        while row == core.FULL_TABLE:
            row = int(self._function("malloc")(*self._tables(), self._settings, self._stats, num_bytes))
            if row == core.FULL_TABLE:
                self._enlarge()
        if row == core.OUT_OF_MEMORY:
            raise OutOfCapacity(num_bytes)
        return row

    def free(self, handle: int) -> None:
        """Give a block back to the cache."""
        self._function("release")(*self._tables(), self._stats, handle)

    def empty_cache(self) -> None:
        """Give cached segments back to the driver, as ``torch.cuda.empty_cache`` does."""
        self._function("release_cached")(*self._tables(), self._settings, self._stats)

    def replay(self, events: Any, sizes: Any) -> tuple[Any, Any]:
        """Run a whole list of events.

        Args:
            events: int64 array: tokens (births) and ``~token`` (deaths).
            sizes: int64 array of bytes by token, all positive.

        Returns:
            Allocated and reserved bytes after each event.

        Raises:
            OutOfCapacity: There is no room; ``index`` is the event that failed.
        """
        rows = np.zeros(len(sizes), dtype=np.int64)
        allocated = np.zeros(len(events), dtype=np.int64)
        reserved = np.zeros(len(events), dtype=np.int64)
        self.run_events(events, sizes, rows, allocated, reserved)
        return allocated, reserved

    def run_events(self, events: Any, sizes: Any, rows: Any, allocated: Any, reserved: Any, start: int = 0) -> None:
        """Run events from ``start``, with the caller's arrays; see ``replay``."""
        step = self._function("replay")
        done = start
        while done < len(events):
            tables = (*self._tables(), self._settings, self._stats)
            done = int(step(*tables, events, sizes, rows, allocated, reserved, done))
            if done < len(events):
                if self._counters[core.NUM_BLOCKS] + 4 < len(self._blocks):
                    raise OutOfCapacity(int(sizes[events[done]]), done)
                self._enlarge()

    def stats(self) -> AllocatorStats:
        """Return the counters."""
        return AllocatorStats(*(int(value) for value in self._stats))

    def unused_bytes(self) -> tuple[int, int]:
        """Return reserved bytes that hold nothing: ``(whole segments, holes beside blocks in use)``."""
        blocks = self._blocks[: int(self._counters[core.NUM_BLOCKS])]
        is_free = blocks[:, core.STATE] == core.FREE
        is_whole = is_free & (blocks[:, core.PREV] == core.NONE) & (blocks[:, core.NEXT] == core.NONE)
        sizes = blocks[:, core.SIZE]
        whole = int(sizes[is_whole].sum())
        return whole, int(sizes[is_free].sum()) - whole

    def reset_peaks(self) -> None:
        """Set the high-water marks to what is held now."""
        for now, peak in (
            (core.ALLOCATED, core.PEAK_ALLOCATED),
            (core.REQUESTED_BYTES, core.PEAK_REQUESTED),
            (core.RESERVED, core.PEAK_RESERVED),
        ):
            self._stats[peak] = self._stats[now]

    def _tables(self) -> tuple[Any, Any, Any, Any]:
        return self._blocks, self._free, self._spare, self._counters

    def _function(self, name: str) -> Any:
        return core.compiled()[name] if self._is_compiled else getattr(core, name)

    def _enlarge(self) -> None:
        count = len(self._blocks)
        blocks, free, spare = core.empty_tables(2 * count)
        blocks[:count], free[:, :count], spare[:count] = self._blocks, self._free, self._spare
        self._blocks, self._free, self._spare = blocks, free, spare


@functools.cache
def start_compiling() -> threading.Thread:
    """Compile the replay in a thread, or read it from numba's cache, while the caller imports and traces.

    Compiling takes about ten seconds once per machine, reading half a second in each process.
    """

    def compile_all() -> None:
        allocator = CachingAllocator()
        allocator.replay(np.array([0, -1], dtype=np.int64), np.array([1], dtype=np.int64))
        allocator.free(allocator.malloc(1))
        allocator.empty_cache()

    thread = threading.Thread(target=compile_all, name="workbench-compile", daemon=True)
    thread.start()
    return thread


# Bytes of cuBLAS's workspace, taken from the caching allocator once for each handle.
# Source: getChosenWorkspaceSize / parseChosenWorkspaceSize, aten/src/ATen/cuda/CublasHandlePool.cpp.
CUBLAS_DEFAULT = 8_519_680  # ":4096:2:16:8" KiB
CUBLAS_HOPPER = 32 * 1024 * 1024
CUBLASLT_DEFAULT = 1024 * 1024
# The thread that runs forward and the thread that runs backward have a handle each.
CUBLAS_HANDLES = 2


def workspace_bytes(compute_capability: tuple[int, int] | None, torch_version: str) -> list[int]:
    """Return the blocks cuBLAS takes for forward and backward, one for each handle.

    Args:
        compute_capability: Of the device; None (ROCm) takes hipBLAS's 32 MiB.
        torch_version: E.g. ``"2.13.0"``; its rules decide the size.

    Source:
        torch 2.10: 32 MiB on compute capability 9.0 only, 1 MiB more for cuBLASLt; torch 2.14: 32 MiB from 9 to 12,
        cuBLASLt shares the block.
    """
    if compute_capability is None:
        return [CUBLAS_HOPPER] * CUBLAS_HANDLES
    version = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2] if part.isdigit())
    major = compute_capability[0]
    if version >= (2, 14):
        size = CUBLAS_HOPPER if 9 <= major <= 12 else CUBLAS_DEFAULT
        return [size] * CUBLAS_HANDLES
    size = CUBLAS_HOPPER if compute_capability == (9, 0) else CUBLAS_DEFAULT
    return [size] * CUBLAS_HANDLES
