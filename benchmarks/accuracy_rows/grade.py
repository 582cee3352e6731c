"""Grade estimates against what was read: per row, then per source and counter."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import WorkbenchError
from workbench.estimate.estimate import Estimate
from workbench.estimate.run import estimate_run
from workbench.hardware import find_device

from .row import MappedRow, UnmappedRow, grades_memory, grades_speed, source_name

# A finished run that left this much of the card free should be called "fits", not "tight".
CLEAR_SPARE = 0.10
_STEP_PHASES = ("forward", "recompute", "backward", "optimizer")


@dataclass(frozen=True)
class Grade:
    """One graded row.

    Attributes:
        mapped: The row as the estimator took it.
        errors: ``{counter: (estimated, measured)}`` in bytes; ``"step time"`` in seconds.
        verdict: ``"fits"``, ``"tight"`` or ``"does_not_fit"``; empty where the estimate failed.
        finished: Whether the published run finished.
        spare_fraction: Share of the card that a finished run left free, by its fullest counter; None where not read.
        contradicted: The verdict for a card of exactly the allocated peak that was read, which cannot hold the run.
        failure: What the estimate raised, if it did.
        basis: What the time is based on.
    """

    mapped: MappedRow
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    verdict: str = ""
    finished: bool = True
    spare_fraction: float | None = None
    contradicted: str = ""
    failure: str = ""
    peak_phase: str = ""

    def relative(self, counter: str) -> float:
        """Return the signed relative error of one counter."""
        estimated, measured = self.errors[counter]
        return estimated / measured - 1.0


@dataclass(frozen=True)
class Summary:
    """Errors of one source and counter.

    Attributes:
        source, counter: What was graded.
        num_rows: Rows of the source that have the counter and were mapped and estimated.
        median, mean: Of the absolute relative errors.
        worst: The signed relative error farthest from 0, and its row.
        bias: Mean of the signed relative errors.
    """

    source: str
    counter: str
    num_rows: int
    median: float
    mean: float
    worst: float
    worst_id: str
    bias: float


@dataclass(frozen=True)
class Verdicts:
    """Verdicts of one source's memory rows."""

    source: str
    num_finished: int
    num_failed: int
    false_fits: int
    false_misfits: int
    tight: int
    clear: int
    clear_called_fits: int
    contradicted_fits: int
    num_contradictable: int


class Grader:
    """Estimates each different run once."""

    def __init__(self) -> None:
        self._estimates: dict[Any, Estimate | str] = {}

    def grade(self, mapped: MappedRow) -> Grade:
        """Return the graded row; an estimate that fails is a grade with ``failure``."""
        estimate = self._estimate(mapped)
        finished = mapped.row["outcome"] == "ok"
        if isinstance(estimate, str):
            return Grade(mapped, finished=finished, failure=estimate)
        errors: dict[str, tuple[float, float]] = {}
        if grades_memory(mapped.row) and finished:  # What a run had taken when it died is no peak.
            for reading in mapped.readings:
                estimated = _estimated_bytes(estimate, reading.counter)
                if estimated is not None:
                    errors[reading.counter] = (float(estimated), float(reading.num_bytes))
        if grades_speed(mapped.row) and mapped.step_s:
            errors["step time"] = (estimate.time.step_s, mapped.step_s)
        highest = max((r.num_bytes for r in mapped.readings if r.counter not in ("context",)), default=0)
        capacity = estimate.memory.capacity_bytes
        return Grade(
            mapped,
            errors,
            estimate.memory.verdict,
            finished,
            1.0 - highest / capacity if highest and finished else None,
            self._contradicted(mapped, estimate),
            peak_phase=estimate.memory.peak_phase,
        )

    def _contradicted(self, mapped: MappedRow, estimate: Estimate) -> str:
        """Return the verdict for a card as large as the allocated peak that was read: the context alone is too much."""
        read = next((reading.num_bytes for reading in mapped.readings if reading.counter == "allocated"), None)
        if read is None:
            return ""
        low, high = estimate.memory.interval_bytes
        return "fits" if high <= read else "does_not_fit" if low > read else "tight"

    def _estimate(self, mapped: MappedRow) -> Estimate | str:
        key = (mapped.recipe.digest(), mapped.shape, mapped.device, mapped.script.name)
        if key not in self._estimates:
            try:
                device = find_device(mapped.device)
                self._estimates[key] = estimate_run(mapped.recipe, device, shape=mapped.shape, script=mapped.script)
            except WorkbenchError as error:
                self._estimates[key] = f"{type(error).__name__}: {error}"
        return self._estimates[key]


def _estimated_bytes(estimate: Estimate, counter: str) -> int | None:
    memory = estimate.memory
    phases = memory.peak_by_phase
    if counter == "allocated":
        # Readers reset the counter after loading, or read it at the end of the Trainer's stages.
        return max((phases[name] for name in _STEP_PHASES if name in phases), default=memory.peak_allocated_bytes)
    if counter in ("reserved", "reserved p99"):
        return memory.peak_reserved_bytes
    if counter in ("process", "nvidia-smi"):
        return memory.process_bytes
    if counter == "context":
        return memory.process_bytes - memory.peak_reserved_bytes
    if counter == "allocated: rest":
        return memory.rest_bytes
    if counter == "allocated: backward":
        return max((phases[name] for name in ("backward", "recompute") if name in phases), default=None)
    if counter in ("allocated: forward", "allocated: optimizer"):
        return phases.get(counter.split(": ")[1])
    return None


def summarize(grades: Iterable[Grade]) -> list[Summary]:
    """Return one summary for each source and counter, in the order they come."""
    groups: dict[tuple[str, str], list[Grade]] = {}
    for grade in grades:
        for counter in grade.errors:
            groups.setdefault((source_name(grade.mapped.row), counter), []).append(grade)
    summaries = []
    for (source, counter), members in groups.items():
        errors = [grade.relative(counter) for grade in members]
        absolute = [abs(error) for error in errors]
        worst = max(range(len(errors)), key=absolute.__getitem__)
        summaries.append(
            Summary(
                source,
                counter,
                len(errors),
                statistics.median(absolute),
                statistics.fmean(absolute),
                errors[worst],
                members[worst].mapped.row["id"],
                statistics.fmean(errors),
            )
        )
    return summaries


def count_verdicts(grades: Iterable[Grade]) -> list[Verdicts]:
    """Return the verdicts of each source that has rows for memory."""
    groups: dict[str, list[Grade]] = {}
    for grade in grades:
        if grades_memory(grade.mapped.row) and not grade.failure:
            groups.setdefault(source_name(grade.mapped.row), []).append(grade)
    return [_count(source, members) for source, members in groups.items()]


def _count(source: str, members: Sequence[Grade]) -> Verdicts:
    finished = [grade for grade in members if grade.finished]
    failed = [grade for grade in members if not grade.finished]
    clear = [grade for grade in finished if grade.spare_fraction is not None and grade.spare_fraction >= CLEAR_SPARE]
    return Verdicts(
        source=source,
        num_finished=len(finished),
        num_failed=len(failed),
        false_fits=sum(grade.verdict == "fits" for grade in failed),
        false_misfits=sum(grade.verdict == "does_not_fit" for grade in finished),
        tight=sum(grade.verdict == "tight" for grade in members),
        clear=len(clear),
        clear_called_fits=sum(grade.verdict == "fits" for grade in clear),
        contradicted_fits=sum(grade.contradicted == "fits" for grade in members),
        num_contradictable=sum(bool(grade.contradicted) for grade in members),
    )


def unmapped_reasons(rows: Iterable[UnmappedRow]) -> dict[str, list[str]]:
    """Return ``{reason: row ids}``."""
    reasons: dict[str, list[str]] = {}
    for unmapped in rows:
        reasons.setdefault(unmapped.reason, []).append(unmapped.row["id"])
    return reasons
