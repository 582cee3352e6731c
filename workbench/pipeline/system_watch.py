"""What the system does beside a loop: graphs that are compiled again, pages read back from disk, the device's limits.

Each reading is a counter that is kept anyway; the dear ones are taken when the watch opens and ends.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ..diagnose.speed import SpeedEvidence
from ..units import KIB

NATIVE_BF16 = (8, 0)  # Compute capability from which on tensor cores take bfloat16 (Ampere).


class SystemWatch:
    """Fills in what the speed doctor needs of compiler, host memory and device."""

    def __init__(self, model: nn.Module | None, speed: SpeedEvidence) -> None:
        self._model, self._speed = model, speed
        self._graphs = _num_graphs()
        self._faults = _major_faults()
        self._swap = _swapped_bytes()

    def step(self, step: int) -> None:
        """Note graphs that were compiled in this step."""
        graphs = _num_graphs()
        if graphs > self._graphs:
            self._speed.compiled_at.extend([step] * (graphs - self._graphs))
        self._graphs = graphs

    def end(self, *, recomputes: bool) -> None:
        """Take the dear readings."""
        speed = self._speed
        speed.num_paged_in = max(0, _major_faults() - self._faults)
        speed.swap_bytes = max(0, _swapped_bytes() - self._swap)
        speed.recomputes = recomputes
        device = next((p.device for p in self._model.parameters()), None) if self._model is not None else None
        if device is None or device.type != "cuda":
            return
        speed.peak_bytes = int(torch.cuda.max_memory_allocated(device))
        speed.capacity_bytes = int(torch.cuda.get_device_properties(device).total_memory)
        assert self._model is not None
        if any(p.dtype == torch.bfloat16 for p in self._model.parameters()):
            speed.emulated_bf16 = emulator_of_bf16(
                torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
            )


def emulator_of_bf16(name: str, capability: tuple[int, int]) -> str:
    """Return the device's name where it emulates bfloat16; capability decides, since torch's flag counts emulation."""
    return name if capability < NATIVE_BF16 else ""


def _num_graphs() -> int:
    """Return how many graphs torch.compile has made in this process; 0 where it was never loaded."""
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return int(counters["stats"]["unique_graphs"]) if counters else 0


def _major_faults() -> int:
    try:
        import resource
    except ImportError:  # Windows has no such counter.
        return 0
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_majflt)


def _swapped_bytes() -> int:
    """Return this process's swapped bytes (Linux), else 0."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            line = next((line for line in file if line.startswith("VmSwap:")), "")
    except OSError:
        return 0
    words = line.split()
    return int(words[1]) * KIB if len(words) > 1 else 0
