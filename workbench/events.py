"""What flows between the stages: values down the line, events back.

Predicted and measured memory are the same noun, :class:`Timeline`, so that the panel draws one under the other.
This file imports no torch: the panel, the CLI and the reports read it without paying for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .errors import Cancelled

# Named as torch.profiler names them, plus what the allocator and the driver add.
MEMORY_CATEGORIES = (
    "parameter",
    "optimizer_state",
    "gradient",
    "activation",
    "autograd_detail",
    "input",
    "temporary",
    "workspace",
    "cached",
    "context",
)

# The states a Session goes through; see train/session.py for the arrows.
RUN_STATES = ("idle", "preparing", "running", "pausing", "paused", "stopping", "stopped", "done", "failed")
LIVE_STATES = frozenset({"preparing", "running", "pausing", "paused", "stopping"})

# Columns of metrics.jsonl and of the live history. Missing values are absent in JSON and NaN in arrays.
METRIC_COLUMNS = (
    "step",  # optimizer steps done, 1 after the first
    "epoch",
    "elapsed_s",  # since the first step began, pauses excluded
    "step_s",
    "loss",  # raw, never filtered; mean over the supervised tokens of the step
    "grad_norm",  # before clipping
    "learning_rate",
    "loss_scale",
    "num_tokens",  # real tokens (padding excluded) in this step
    "num_padding_tokens",
    "num_supervised_tokens",
    "tokens_per_s",
    "allocated_bytes",  # at rest, after the step
    "peak_allocated_bytes",  # highest inside the step
    "reserved_bytes",
    "process_bytes",
    "eval_loss",
    "micro_batch_size",  # samples of a forward pass
    "accumulation",  # forward passes of the step
    "noise_scale_tokens",  # with policies.batch=noise_scale: supervised tokens at which noise equals gradient
    "utilization_fraction",  # share of the step in which the device computed
    "cost_usd",  # of the run so far, where a price is known
    "eval_accuracy",  # of a classifier: share of the held-out rows it gets right
)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one stage of long work is.

    Attributes:
        stage: ``"download"``, ``"load"``, ``"tokenize"``, ``"trace"``, ``"train"``, ``"evaluate"``, ``"save"``.
        done: Units done.
        total: Units in all, or None where it is not known.
        message: One short sentence for a person.
    """

    stage: str
    done: float = 0
    total: float | None = None
    message: str = ""


ProgressCallback = Callable[[Progress], None]


class Cancel:
    """A flag that long work looks at. Thread-safe; ``check`` costs one attribute read."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Ask the work to end at its next check."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether the work was asked to end."""
        return self._event.is_set()

    def check(self) -> None:
        """Raise Cancelled when the flag is set."""
        if self._event.is_set():
            raise Cancelled("Cancelled. Nothing was lost; start again when you like.")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened in a run; one line of ``events.jsonl``.

    Attributes:
        kind: ``"state"``, ``"step"``, ``"progress"``, ``"evaluation"``, ``"checkpoint"``, ``"finding"``,
            ``"edit"``, ``"log"``, ``"spike"``, ``"pruning"``, ``"batch"``, ``"samples"``, ``"error"``.
        data: Plain JSON values. ``step`` events carry the columns of METRIC_COLUMNS.
        time_s: Wall-clock seconds since the epoch.
    """

    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)
    time_s: float = field(default_factory=time.time)


class Observer(Protocol):
    """Receives every event of a run, in the training thread; must return fast and never raise."""

    def on_event(self, event: Event) -> None:
        """Take one event."""


class Meter(Protocol):
    """Measures memory (or anything cheap) at the end of a step; its values join the metrics row."""

    def start(self) -> None:
        """Begin measuring, in the training thread, before the model is loaded."""

    def measure_step(self) -> dict[str, float]:
        """Return metric columns for the step just ended and reset the high-water marks."""

    def stop(self) -> None:
        """End measuring and release what the meter holds."""


@dataclass(frozen=True)
class Timeline:
    """Memory over the life of a run, by category: predicted or measured.

    Attributes:
        bytes_by_category: One sequence per category of MEMORY_CATEGORIES that occurs; all of equal length N.
        phases: ``(start_index, name)``, ascending; e.g. ``(0, "load"), (120, "forward")``.
        reserved_bytes: Length N, or empty where it is not known.
        peak_index: Index of the highest instant.
        measured: False for a prediction.
    """

    bytes_by_category: Mapping[str, Sequence[int]]
    phases: Sequence[tuple[int, str]]
    reserved_bytes: Sequence[int] = ()
    peak_index: int = 0
    measured: bool = False
