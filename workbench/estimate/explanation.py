"""Why a run takes the memory it takes. Plain data: no torch, so that panel, CLI and report read it for free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Instant:
    """One instant of the run.

    Attributes:
        point: Its index in the picture.
        phase: ``"load"``, ``"forward"``, ``"backward"``, ``"recompute"``, ``"optimizer"`` or ``"evaluation"``.
        step: Optimizer step, 0 for the first; None outside the steps.
        module: Module whose code ran, with layer numbers as ``*``; empty outside the model.
        operator: Operator that took memory then, e.g. ``"aten._log_softmax"``.
        allocated_bytes: Allocated bytes.
        repeats: How often the run comes to within 2 % of it at the same place: other layers, micro-batches and steps.
    """

    point: int
    phase: str
    step: int | None
    module: str
    operator: str
    allocated_bytes: int
    repeats: int = 1


@dataclass(frozen=True)
class Share:
    """Bytes alive at the peak under one name (a category, a module or an operator), and their storages."""

    name: str
    num_bytes: int
    count: int


@dataclass(frozen=True)
class Gap:
    """One reason why more is reserved than tensors need.

    Attributes:
        kind: ``"rounding"`` (inside allocated), ``"holes"``, ``"segments"`` or ``"later"`` (between allocated and
            reserved).
        num_bytes: What it takes.
        sentence: The reason in words.
    """

    kind: str
    num_bytes: int
    sentence: str


@dataclass(frozen=True)
class MemoryPicture:
    """Who lives at each of P instants: what a timeline shows, and what a click on it asks for.

    Attributes:
        bytes_by_category: P values for each category that occurs.
        reserved_bytes: P values; empty on a CPU.
        phases: ``(first point, phase)``, ascending.
        steps: ``(first point, optimizer step or None)``, ascending.
        peak, next_highest: Points to mark; the second is -1 where there is only one hill.
        window: ``(first, last)`` point of the step with the peak.
        keys: ``(category, module)`` of each column of ``holders``.
        holders: int64 array of shape (P, len(keys)): bytes alive.
    """

    bytes_by_category: Mapping[str, Sequence[int]]
    reserved_bytes: Sequence[int]
    phases: Sequence[tuple[int, str]]
    steps: Sequence[tuple[int, int | None]]
    peak: int
    next_highest: int
    window: tuple[int, int]
    keys: Sequence[tuple[str, str]]
    holders: Any

    @property
    def num_points(self) -> int:
        """P."""
        return len(self.holders)

    def holders_at(self, point: int, category: str | None = None) -> list[tuple[str, str, int]]:
        """Return ``(category, module, bytes)`` of who lives at a point, largest first.

        Args:
            point: Index of an instant.
            category: Only this one; None for all.
        """
        row = self.holders[point]
        found = [
            (*key, int(size))
            for key, size in zip(self.keys, row, strict=True)
            if size > 0 and category in (None, key[0])
        ]
        return sorted(found, key=lambda item: -item[2])

    def phase_at(self, point: int) -> str:
        """Return the phase of a point."""
        return next((name for start, name in reversed(self.phases) if start <= point), "")

    def step_at(self, point: int) -> int | None:
        """Return the optimizer step of a point, 0 for the first; None outside the steps."""
        return next((step for start, step in reversed(self.steps) if start <= point), None)


@dataclass(frozen=True)
class Explanation:
    """Why the peak is what and where it is.

    Attributes:
        peak: The highest instant.
        next_highest: The highest instant at another place, which the peak falls to when its cause is taken away; None
            where there is none.
        by_category: Who lives at the peak.
        by_module: The same by module, layer numbers as ``*``.
        by_operator: The same by the operator that made it; weights have none.
        bytes_per_token: What the peak grows by for each token that every micro-batch has more, at this length.
        bytes_per_sample: What it grows by for one more sample in each micro-batch.
        gaps: Why reserved exceeds allocated, largest first; empty on a CPU.
        picture: Who lives at each instant; None where it was left out.
    """

    peak: Instant
    next_highest: Instant | None
    by_category: Sequence[Share]
    by_module: Sequence[Share]
    by_operator: Sequence[Share]
    bytes_per_token: float | None
    bytes_per_sample: float | None
    gaps: Sequence[Gap]
    picture: MemoryPicture | None

    def without_picture(self) -> Explanation:
        """Return the same without the picture, whose arrays are no JSON."""
        return replace(self, picture=None)
