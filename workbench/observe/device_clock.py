"""Where a device stands while its host runs ahead: marks laid into its stream, read when the device has passed them.

A mark costs a few microseconds and waits for nothing: a time that is not known yet is asked for again later.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch

from .storages import user_line

SYNC_MESSAGE = "called a synchronizing CUDA operation"


class DeviceClock(Protocol):
    """Marks in a device's stream of work; tests have one of their own."""

    def mark(self) -> Any:
        """Lay a mark behind all work that was given to the device so far."""

    def between_s(self, first: Any, last: Any) -> float | None:
        """Return the seconds from one mark to another as the device passed them; None while it has not."""


class CudaClock:
    """The clock of a CUDA device: timing events."""

    def mark(self) -> Any:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, first: Any, last: Any) -> float | None:
        """Return what the events say, without waiting for them."""
        return first.elapsed_time(last) / 1000 if last.query() else None


class SyncListener:
    """Tells of operations that make the host wait for the device, by the line of the user's code that calls them.

    ``torch.cuda.set_sync_debug_mode`` warns of each; the warnings are taken here instead of being printed. Listening
    costs a Python call for each such operation, so it is done for a few steps.

    Args:
        note: Called with ``file:line``.
        set_mode: Sets torch's mode and is given ``"warn"`` or ``"default"``; tests give one of their own.
    """

    def __init__(self, note: Callable[[str], None], set_mode: Callable[[str], Any] | None = None) -> None:
        self._note = note
        self._set_mode: Callable[[str], Any] = set_mode or torch.cuda.set_sync_debug_mode
        self._shown: Any = None
        self._filters: warnings.catch_warnings[Any] | None = None

    def __enter__(self) -> SyncListener:
        self._filters = warnings.catch_warnings()
        self._filters.__enter__()
        warnings.filterwarnings("always", message=f".*{SYNC_MESSAGE}.*")
        self._shown = warnings.showwarning
        warnings.showwarning = self._take
        self._set_mode("warn")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._set_mode("default")
        if self._filters is not None:
            self._filters.__exit__(kind, error, traceback)
            self._filters = None

    def _take(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
        if SYNC_MESSAGE in str(message):
            self._note(user_line(2) or f"{filename}:{lineno}")
        else:
            self._shown(message, category, filename, lineno, *rest, **more)
