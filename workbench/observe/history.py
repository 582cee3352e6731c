"""History: every step of a run in columns, appended by the training thread, read by anyone without a lock."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..events import METRIC_COLUMNS

Floats = npt.NDArray[np.float64]

MAX_POINTS = 4000
_FIRST_CAPACITY = 1024
_PLACES = {name: place for place, name in enumerate(METRIC_COLUMNS)}
_STEP = _PLACES["step"]
_ROW = struct.Struct(f"{len(METRIC_COLUMNS)}d")


class History:
    """Append-only columns of METRIC_COLUMNS; a missing value is NaN.

    One thread appends. Readers take the length first and the array second: the array only ever grows, and the rows
    below a length that was seen are complete, so they need no lock and the writer never waits for them.
    """

    def __init__(self) -> None:
        self._length = 0
        # Rows lie together and are packed in one call: 1 µs instead of 5 for one store per column.
        self._data = np.full((_FIRST_CAPACITY, len(METRIC_COLUMNS)), np.nan)

    def __len__(self) -> int:
        return self._length

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; names that are no metric column are left out.

        A row whose step is not above the last one supersedes the rows from that step on: a resumed run repeats the
        steps after its checkpoint.
        """
        place, data = self._length, self._data
        values = [row.get(name, math.nan) for name in METRIC_COLUMNS]
        if None in values:
            values = [math.nan if value is None else value for value in values]
        if place and values[_STEP] <= data[place - 1, _STEP]:
            place = int(np.searchsorted(data[:place, _STEP], values[_STEP]))
            self._length = place
        if place == data.shape[0]:
            data = np.full((2 * place, data.shape[1]), np.nan)
            data[:place] = self._data
            self._data = data
        _ROW.pack_into(data.data, place * _ROW.size, *values)
        self._length = place + 1  # Last: from here on readers see the row.

    def column(self, name: str) -> Floats:
        """Return all rows of a column as a read-only view.

        Raises:
            KeyError: No such column.
        """
        if name not in _PLACES:
            raise KeyError(f"{name!r} is no metric column. Columns: {', '.join(METRIC_COLUMNS)}.")
        length, data = self._length, self._data
        view = data[:length, _PLACES[name]]
        view.flags.writeable = False
        return view

    def rows_since(self, first: int) -> dict[str, Floats]:
        """Return the rows from index ``first`` on, all columns of the same length."""
        length, data = self._length, self._data
        return {name: data[first:length, place] for name, place in _PLACES.items()}

    def last(self, name: str) -> float | None:
        """Return the newest value of a column that is not missing, or None."""
        values = self.column(name)
        present = np.flatnonzero(~np.isnan(values))
        return float(values[present[-1]]) if len(present) else None

    def decimated(self, name: str, max_points: int = MAX_POINTS) -> tuple[Floats, Floats]:
        """Return ``(steps, values)`` with at most ``max_points`` points that keep every spike.

        Each stretch of rows gives its lowest and its highest value, so that a single bad step stays visible however
        long the run is. Missing values are left out.
        """
        values, steps = self.column(name), self.column("step")
        length = min(len(values), len(steps))
        present = np.flatnonzero(~np.isnan(values[:length]))
        if len(present) > max_points:
            size = -(-len(present) // (max_points // 2))
            pad = -len(present) % size
            grid = np.concatenate((values[present], np.full(pad, values[present[-1]]))).reshape(-1, size)
            starts = np.arange(len(grid)) * size
            extremes = np.stack((grid.argmin(axis=1) + starts, grid.argmax(axis=1) + starts))
            chosen = np.unique(np.minimum(extremes, len(present) - 1))
            present = present[chosen]
        return steps[present], values[present]

    @classmethod
    def from_folder(cls, path: str | Path) -> History:
        """Read ``metrics.jsonl`` of a run folder; lines that are not whole rows are left out."""
        history = cls()
        try:
            with open(Path(path) / "metrics.jsonl", encoding="utf-8", errors="replace") as file:
                for line in file:
                    row = read_row(line)
                    if row is not None:
                        history.append(row)
        except FileNotFoundError:
            pass
        return history


def read_row(line: str) -> dict[str, float] | None:
    """Return the numbers of one line of ``metrics.jsonl``, or None for a half-written or foreign line."""
    try:
        values = json.loads(line)
        return {name: float(value) for name, value in values.items() if name in _PLACES and value is not None}
    except (ValueError, TypeError, AttributeError):
        return None
