"""All doctors over the history of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .finding import Finding
from .leaks import LeakVerdict, judge_leak, leak_finding
from .loss import find_loss_faults
from .spikes import find_spikes


class Columns(Protocol):
    """What the doctors need of a history: a column by name, NaN where a value is missing."""

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """Return all rows of one column of METRIC_COLUMNS."""


def judge_memory(history: Columns, *, counter: str, capacity_bytes: int | None = None) -> LeakVerdict:
    """Return the leak verdict over the run so far."""
    return judge_leak(
        history.column("allocated_bytes"),
        counter=counter,
        capacity_bytes=capacity_bytes,
        num_tokens=history.column("num_tokens") + np.nan_to_num(history.column("num_padding_tokens")),
        peak_bytes=history.column("peak_allocated_bytes"),
        reserved_bytes=history.column("reserved_bytes"),
    )


def diagnose_run(
    history: Columns,
    *,
    counter: str = "allocated bytes",
    capacity_bytes: int | None = None,
    spikes: Sequence[Mapping[str, Any]] = (),
) -> list[Finding]:
    """Return what is wrong with a run; empty when nothing is.

    Args:
        history: Its steps.
        counter: What the memory columns hold, in words.
        capacity_bytes: Memory of the device, where it has its own.
        spikes: Data of its ``"spike"`` events.
    """
    steps = history.column("step")
    is_step = np.isfinite(steps) & np.isfinite(history.column("step_s"))  # evaluation rows hold no step time
    findings = find_loss_faults(steps[is_step], history.column("loss")[is_step], history.column("grad_norm")[is_step])
    leak = leak_finding(judge_memory(history, counter=counter, capacity_bytes=capacity_bytes))
    return findings + [finding for finding in (leak, find_spikes(spikes)) if finding]
