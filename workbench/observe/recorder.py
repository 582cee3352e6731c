"""Recorder: an Observer that keeps a run's History in memory and its files on disk."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..events import Event
from .history import History

FLUSH_INTERVAL_S = 0.5

# What is kept in memory while a disk is full, for the day it has room again.
MAX_PENDING_BYTES = 64 * 1024 * 1024

# Too many, and of no use later.
_NOT_RECORDED = frozenset({"progress"})


class Recorder:
    """Steps go to the History and ``metrics.jsonl``, all else to ``events.jsonl``, findings also to their own file.

    Lines are written at most every half second and whenever the run changes its state. Writing never raises: what a
    full disk refuses stays in memory and is tried again.

    Attributes:
        history: All steps, those of the folder's earlier runs included.
        write_error: What the last write failed with, or None.
    """

    def __init__(self, path: str | Path) -> None:
        """Make a recorder for a run folder, which need not exist before the first event.

        Args:
            path: The run folder; what it holds already is read into the history.
        """
        folder = Path(path)
        self.history = History.from_folder(folder)
        self.write_error: OSError | None = None
        self._metrics = _LineFile(folder / "metrics.jsonl")
        self._events = _LineFile(folder / "events.jsonl")
        self._findings = _LineFile(folder / "findings.jsonl")
        self._last_flush = 0.0

    def on_event(self, event: Event) -> None:
        """Take one event."""
        if event.kind in _NOT_RECORDED:
            if event.data.get("stage") == "save":
                self.flush()  # A checkpoint must not know steps that the files do not, whenever the process is killed.
            return
        if event.kind == "step":
            self.history.append(event.data)
            self._metrics.add(encode(event.data))
        else:
            line = encode({"time_s": round(event.time_s, 3), "kind": event.kind, "data": event.data})
            self._events.add(line)
            if event.kind == "finding":
                self._findings.add(line)
        if event.kind in ("state", "checkpoint") or time.monotonic() - self._last_flush > FLUSH_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Write what is pending."""
        self._last_flush = time.monotonic()
        self.write_error = None
        for file in (self._metrics, self._events, self._findings):
            try:
                file.flush()
            except OSError as error:
                self.write_error = error


class _LineFile:
    """An append-only file of lines. A write that fails half-way leaves no half line behind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def add(self, line: str) -> None:
        data = line.encode() + b"\n"
        if self._pending_bytes + len(data) <= MAX_PENDING_BYTES:
            self._pending.append(data)
            self._pending_bytes += len(data)

    def flush(self) -> None:
        if not self._pending:
            return
        # Opened anew each time: nothing to close when a kernel is killed, and a folder that moved is noticed.
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            data = b"".join(self._pending)
            if size and os.pread(handle, 1, size - 1) != b"\n":
                data = b"\n" + data  # A killed process left half a line; it must not swallow the next one.
            try:
                written = 0
                while written < len(data):
                    written += os.write(handle, data[written:])
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, size)
                raise
            self._pending.clear()
            self._pending_bytes = 0
        finally:
            os.close(handle)


def encode(values: Mapping[str, Any]) -> str:
    """Return one line of JSON; NaN and infinities become texts, since JSON has no numbers for them.

    ``float("NaN")`` and ``float("Infinity")`` read them back.
    """
    try:
        return json.dumps(values, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_without_nan(values), default=str)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value
