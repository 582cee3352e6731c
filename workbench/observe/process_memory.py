"""Bytes in use by this process on the heap and in the caching allocator, read only as often as it is cheap."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from .meters import COST_RATIO, heap_reader, resident_bytes

# A reading this cheap may be taken at every step; a dearer one waits until COST_RATIO times its cost has passed.
CHEAP_S = 0.15e-3


class InUseReader:
    """Reads bytes in use: heap (glibc) plus what the CUDA allocator has given out."""

    def __init__(self) -> None:
        self._next = 0.0

    def read(self) -> int | None:
        """Return the bytes in use, or None when a reading is not affordable yet."""
        if time.perf_counter() < self._next:
            return None
        # The thread's own time: a reading that was only preempted is not dear.
        started = time.thread_time()
        value = _reader()()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            value += torch.cuda.memory_allocated()
        cost = time.thread_time() - started
        self._next = 0.0 if cost < CHEAP_S else time.perf_counter() + COST_RATIO * cost
        return value


@functools.cache
def _reader() -> Callable[[], int]:
    return heap_reader() or resident_bytes
