"""The list of faults: which there are, a run of each by name, and what the doctors said of it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import io
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...diagnose.causes import CAUSES
from ...diagnose.finding import Finding, render_findings

Verdicts = list[Finding]
Fault = Callable[[bool], Any]
"""Takes whether the healthy twin is wanted; returns a watch, a release report, or findings."""

_FAULTS: dict[str, Fault] = {}
_FILES = ("leaking", "holding", "out_of_memory", "not_finite", "rows", "models", "courses", "slow")

_ELSEWHERE = {
    "oom.other_process": "Needs a CUDA device on which a second process holds memory: start one there, and train.",
    "speed.host_bound": "Needs a CUDA device: a CPU is its own host.",
    "speed.sync_every_step": "Needs a CUDA device: on a CPU the host never runs ahead of what it computes.",
    "speed.emulated_bf16": "Needs a CUDA device before Ampere, such as a T4, or a CPU without bfloat16 units.",
    "speed.checkpointing_unneeded": "Needs a CUDA device, whose peak is compared with its capacity.",
    "speed.swap": "Needs a machine whose memory is full: to bring that about would harm what else runs on it.",
}


@dataclass(frozen=True)
class ClinicRun:
    """One run of a fault or of its twin.

    Attributes:
        cause: What the fault is.
        is_healthy: Whether it was the twin without the fault.
        findings: What the doctors said, verdicts of health included.
        elapsed_s: Seconds it took.
    """

    cause: str
    is_healthy: bool
    findings: tuple[Finding, ...]
    elapsed_s: float

    @property
    def is_named(self) -> bool:
        """Whether the doctors named the cause."""
        return any(finding.cause == self.cause for finding in self.findings)

    def __str__(self) -> str:
        kind = "healthy twin" if self.is_healthy else "fault"
        head = f"{self.cause} ({CAUSES[self.cause].title}), {kind}, {self.elapsed_s:.1f} s:"
        return f"{head}\n{render_findings(self.findings)}"

    __repr__ = __str__

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def fault(cause: str) -> Callable[[Fault], Fault]:
    """Add a function to the list as the fault of a cause.

    Raises:
        ValueError: The cause is not one of ``diagnose.causes``, or has its fault.
    """

    def add(function: Fault) -> Fault:
        if cause not in CAUSES or cause in _FAULTS:
            raise ValueError(f"{cause!r} is no cause of diagnose/causes.py, or has a fault already.")
        _FAULTS[cause] = function
        return function

    return add


def names() -> list[str]:
    """Return the causes that have a fault, in the order of the list of causes."""
    _load()
    return [cause for cause in CAUSES if cause in _FAULTS]


def elsewhere() -> dict[str, str]:
    """Return the causes that cannot be brought about on every machine, each with what it needs."""
    return dict(_ELSEWHERE)


def source_of(cause: str) -> str:
    """Return the code of a fault and of its twin.

    Raises:
        ValueError: No such fault.
    """
    return inspect.getsource(_find(cause))


def run(cause: str, *, healthy: bool = False) -> ClinicRun:
    """Run a fault, or its twin, and return what the doctors say.

    Args:
        cause: One of ``names()``.
        healthy: Run the twin, which differs by the fault alone.

    Raises:
        ValueError: No such fault.
    """
    function = _find(cause)
    started = time.perf_counter()
    with _alone():
        found = _findings_of(function(healthy))
    return ClinicRun(cause, healthy, tuple(found), time.perf_counter() - started)


def _find(cause: str) -> Fault:
    _load()
    if cause in _ELSEWHERE:
        raise ValueError(f"{cause!r} has no fault here. {_ELSEWHERE[cause]}")
    if cause not in _FAULTS:
        raise ValueError(f"{cause!r} is no cause with a fault. Those with one: {', '.join(names())}.")
    return _FAULTS[cause]


def _load() -> None:
    for name in _FILES:
        importlib.import_module(f"{__package__}.{name}")


def _findings_of(result: Any) -> Verdicts:
    if isinstance(result, Finding):
        return [result]
    if result is None or isinstance(result, list):
        return list(result or ())
    verdict = getattr(result, "memory_verdict", None)
    found: Verdicts = list(result.findings)
    return found if verdict is None or verdict in found else [*found, verdict]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Run with the same random numbers, quietly, and with older objects out of the collector's sight."""
    state, python_state, was_frozen = torch.get_rng_state(), random.getstate(), gc.get_freeze_count() > 0
    if not was_frozen:
        gc.collect()
    # Else each of a look's many collections goes through everything that a notebook has loaded.
    gc.freeze()
    torch.manual_seed(0)
    random.seed(0)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python_state)
        gc.collect()
        if not was_frozen:
            gc.unfreeze()
