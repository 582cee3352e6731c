"""What the caching allocator holds of the device and no tensor uses when it holds most, and why it asked for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..units import format_bytes
from .assemble import Schedule


@dataclass(frozen=True)
class Fragmentation:
    """Memory that is reserved without a use.

    Attributes:
        num_bytes: Reserved and not allocated, at the instant of the highest reserved memory that uses most of it.
        cause: What was asked for when the allocator last took memory from the driver, and why what it had did not do;
            empty where nothing is unused.
    """

    num_bytes: int
    cause: str


def find_fragmentation(schedule: Schedule, allocated: Any, reserved: Any) -> Fragmentation:
    """Return what is unused at the reserved peak, and its cause.

    Args:
        schedule: The run's events.
        allocated: Bytes allocated after every event, int64.
        reserved: Bytes reserved after every event, int64. On a CPU equal to ``allocated``, so that nothing is unused.
    """
    top = int(reserved.max())
    at_top = np.flatnonzero(reserved == top)
    unused = top - int(allocated[at_top].max())
    if not unused:
        return Fragmentation(0, "")
    first = int(at_top[0])
    event = int(schedule.events[first])
    free = int(reserved[first - 1] - allocated[first - 1]) if first else 0
    num_bytes = int(schedule.sizes[event]) if event >= 0 else 0
    if first == 0 or num_bytes == 0 or num_bytes > top - int(reserved[first - 1]):
        return Fragmentation(unused, _outside(schedule, first))
    asked = f"{_place(schedule, first, event)} asked for {format_bytes(num_bytes)}"
    if free >= num_bytes:
        return Fragmentation(
            unused,
            f"{asked} while {format_bytes(free)} lay free in pieces of which none is as large, so that the allocator "
            "took a new segment.",
        )
    taken = format_bytes(top - int(reserved[first - 1]))
    return Fragmentation(
        unused,
        f"{asked} while only {format_bytes(free)} lay free, so that the allocator took a segment of {taken}; later "
        "requests do not fill it.",
    )


def _outside(schedule: Schedule, index: int) -> str:
    """Return the cause where no tensor of the model made the allocator grow last."""
    phase = schedule.life.tape.phase_names[int(schedule.phases[index])]
    if phase == "load":
        return (
            "The loader takes all weights in one block before it reads them; later requests fit into what it leaves, "
            "and do not fill it."
        )
    return (
        f"cuBLAS took its workspace in {phase}, which is kept for good and parts what is free into pieces that later "
        "requests do not fill."
    )


def _place(schedule: Schedule, index: int, token: int) -> str:
    """Return operator, phase and step of an event, e.g. ``"aten._log_softmax in forward of step 1"``."""
    tape = schedule.life.tape
    operator = tape.operator_names[tape.operators[int(schedule.life.sources[schedule.sources[token]])]]
    phase = tape.phase_names[int(schedule.phases[index])]
    stretch = next(item for item in schedule.stretches if item.begin <= index < item.end)
    return f"{operator} in {phase}" + (f" of step {stretch.step + 1}" if stretch.step is not None else "")
