"""Meters: memory at rest after a step, and the highest inside it, on a CPU and on a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
import time
from collections.abc import Callable

from ..events import Meter
from ..hardware import Device, target_device
from ..recipe import Recipe

SAMPLE_INTERVAL_S = 0.01

# Reading the C library's counters walks its free lists: 20 µs in a fresh process, 17 ms with 200,000 free chunks
# (measured). A reading is paid for by waiting this many times as long before the next one.
COST_RATIO = 150.0


class CpuMeter:
    """Bytes in use in the C library's heap (glibc ``mallinfo2``), where torch's CPU tensors are.

    Elsewhere (other C libraries) the resident set takes its place, which also counts freed memory that the process
    keeps. The peak inside a step is sampled by a thread every few milliseconds, so that very short peaks can be missed;
    a column is left out of a step in which no reading was affordable.
    """

    def __init__(self) -> None:
        self._read = heap_reader() or resident_bytes
        self.counter = "heap bytes in use" if self._read is not resident_bytes else "resident bytes"
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.baseline_bytes: int | None = None  # in use before the run: a prediction counts from here
        self._peak = 0
        self._next_reading = 0.0

    def start(self) -> None:
        """Begin sampling."""
        self.baseline_bytes = self._read()
        self._stop.clear()
        self._thread = threading.Thread(target=self._sample, name="workbench-memory", daemon=True)
        self._thread.start()

    def measure_step(self) -> dict[str, float]:
        """Return bytes at rest, the highest since the last call, and the resident set."""
        values: dict[str, float] = {"process_bytes": resident_bytes()}
        now = time.perf_counter()
        at_rest = self._affordable_reading() if now >= self._next_reading else None
        with self._lock:
            peak, self._peak = self._peak, 0
        if at_rest is not None:
            values["allocated_bytes"] = at_rest
            peak = max(peak, at_rest)
        if peak:
            values["peak_allocated_bytes"] = peak
        return values

    def stop(self) -> None:
        """End sampling."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)
            self._thread = None

    def _affordable_reading(self) -> int:
        start = time.thread_time()  # The thread's own time: a reading that was only interrupted is not dear.
        value = self._read()
        self._next_reading = time.perf_counter() + (time.thread_time() - start) * COST_RATIO
        return value

    def _sample(self) -> None:
        interval = SAMPLE_INTERVAL_S
        while not self._stop.wait(interval):
            start = time.thread_time()
            value = self._read()
            cost = time.thread_time() - start
            with self._lock:
                self._peak = max(self._peak, value)
            interval = max(SAMPLE_INTERVAL_S, 2 * COST_RATIO * cost)  # Readings at rest matter more.


class CudaMeter:
    """The caching allocator's own counters: exact, and free to read."""

    counter = "allocated GPU bytes"

    def __init__(self) -> None:
        self.baseline_bytes: int | None = None  # allocated before the run: a prediction counts from here
        self._is_running = False

    def start(self) -> None:
        """Reset the high-water marks."""
        import torch

        self.baseline_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._is_running = True

    def measure_step(self) -> dict[str, float]:
        """Return allocated, peak and reserved bytes, and reset the peak."""
        import torch

        if not self._is_running:
            return {}
        values: dict[str, float] = {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
        }
        torch.cuda.reset_peak_memory_stats()
        if importlib.util.find_spec("pynvml") is not None:  # The driver's own figure, as nvidia-smi shows it.
            values["utilization_fraction"] = torch.cuda.utilization() / 100
        return values

    def stop(self) -> None:
        """End measuring."""
        self._is_running = False


def choose_meter(recipe: Recipe, device: Device) -> Meter:
    """Return the meter for a run of ``recipe`` on ``device``, the device it really runs on."""
    if device.has_caching_allocator and recipe.hardware.device != "cpu":
        return CudaMeter()
    wanted = target_device(recipe) if recipe.hardware.emulate else device
    if wanted.has_caching_allocator:
        from .emulated import EmulatedMeter

        return EmulatedMeter(
            wanted,
            expandable_segments=recipe.hardware.expandable_segments,
            torch_version=recipe.hardware.torch_version,
        )
    return CpuMeter()


def resident_bytes() -> int:
    """Return the process's resident set in bytes."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(64).split()[1]) * _PAGE_BYTES
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().rss)


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def heap_reader() -> Callable[[], int] | None:
    """Return a function that reads the bytes in use in the heap, or None where the C library has no mallinfo2."""
    try:
        function = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return None
    function.restype = _MallInfo

    def read() -> int:
        info = function()
        return int(info.uordblks + info.hblkhd)

    return read
