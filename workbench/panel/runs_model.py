"""The table of runs as plain data: rows, order, which are chosen. No widgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..pipeline.run_rows import RunRow
from ..units import format_bytes

HEADER = ("State", "Model", "Data", "Steps", "Loss", "Peak predicted", "Peak measured", "On disk")
# A class for cells that are looked at differently.
KINDS = ("state", "text", "text", "number", "number", "number", "number", "number")

SORTS: dict[str, tuple[Callable[[RunRow], Any], bool]] = {
    "Newest first": (lambda row: row.summary.started_s, True),
    "Name": (lambda row: row.summary.name.lower(), False),
    "Lowest loss": (lambda row: _or_inf(row.summary.loss), False),
    "Highest peak": (lambda row: row.measured_peak_bytes or 0.0, True),
    "Largest on disk": (lambda row: row.summary.num_bytes, True),
}


class RunsModel:
    """The rows of the table, their order, and which are chosen. A run is known by its folder."""

    def __init__(self, rows: Sequence[RunRow] = ()) -> None:
        self._rows = tuple(rows)
        self._chosen: list[Path] = []
        self.sort = "Newest first"

    @property
    def rows(self) -> list[RunRow]:
        """The rows in the order asked for."""
        key, is_reversed = SORTS[self.sort]
        return sorted(self._rows, key=key, reverse=is_reversed)

    def set_rows(self, rows: Sequence[RunRow]) -> None:
        """Take new rows; what was chosen and is still there stays chosen."""
        self._rows = tuple(rows)
        there = {row.summary.path for row in rows}
        self._chosen = [path for path in self._chosen if path in there]

    def choose(self, path: Path, chosen: bool) -> None:
        """Choose a run, or leave it out."""
        if chosen and path not in self._chosen:
            self._chosen.append(path)
        elif not chosen and path in self._chosen:
            self._chosen.remove(path)

    @property
    def chosen(self) -> list[RunRow]:
        """The chosen rows, in the order in which they were chosen."""
        by_path = {row.summary.path: row for row in self._rows}
        return [by_path[path] for path in self._chosen]

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs on disk."""
        return sum(row.summary.num_bytes for row in self._rows)


def cells_of(row: RunRow, say: Callable[[str], str]) -> list[str]:
    """Return a row's cells as HEADER names them."""
    run = row.summary
    return [
        say(run.state),
        run.model.rstrip("/").rsplit("/", 1)[-1],
        run.data.rstrip("/").rsplit("/", 1)[-1],
        str(run.num_steps_done),
        "" if run.loss is None else f"{run.loss:.4f}",
        "" if row.predicted is None else format_bytes(row.predicted.peak_bytes),
        "" if row.measured_peak_bytes is None else format_bytes(row.measured_peak_bytes),
        format_bytes(run.num_bytes),
    ]


def _or_inf(value: float | None) -> float:
    return math.inf if value is None or not math.isfinite(value) else value
