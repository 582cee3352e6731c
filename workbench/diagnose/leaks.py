"""Leak verdict from what memory did between steps.

The channel is the bytes at rest after each step (allocator statistics on CUDA, glibc's in-use bytes on the CPU).
A trend test alone is not sound on such series: warm-up, a longest batch and allocator noise all look like growth.
So the verdict compares the floors of windows: a leak lifts the floor of every window at a steady rate, while noise,
saw-teeth and long batches leave the floor where it was. What the channel cannot see is said in ``watched``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..units import MIB, format_bytes
from .finding import Finding, Fix

FloatArray = npt.NDArray[np.float64]

MIN_STEPS = 20  # Fewer steps after warm-up give windows too short to have a floor.
NUM_WINDOWS = 10
LATE_SHARE = 0.3  # A leak keeps at least this share of its slope to the end; a warm-up does not.


VERDICT_WORDS = {
    "leak": "Leak",
    "bounded_buffer": "A buffer that is full, no leak",
    "warm_up": "Warm-up, no leak",
    "longer_batch": "Longer batches, no leak",
    "periodic": "Comes and goes, no leak",
    "fragmentation": "Fragmentation, no leak",
    "clean": "No leak",
    "too_early": "Too early to tell",
}
MIN_SWING = 0.7  # Correlation of a series with itself one period later.
FOLLOWS = 0.95  # Correlation with the tokens above which they explain the level.
WASTED_SHARE = 0.25  # Of what is reserved; the allocator's rounding alone wastes less.


@dataclass(frozen=True, slots=True)
class LeakVerdict:
    """What the leak detector says.

    Attributes:
        verdict: ``"leak"``, ``"bounded_buffer"``, ``"warm_up"``, ``"longer_batch"``, ``"periodic"``,
            ``"fragmentation"``, ``"clean"`` or ``"too_early"``.
        reason: One sentence: what was seen.
        watched: One sentence: which steps and which counter, and what this counter cannot see.
        bytes_per_step: Growth of the floor at rest; 0 unless it is a leak.
        steps_until_full: Steps until the capacity is reached, or None.
        num_steps: Steps watched.
    """

    verdict: str
    reason: str
    watched: str
    bytes_per_step: float
    steps_until_full: int | None
    num_steps: int

    @property
    def text(self) -> str:
        """Verdict, reason and what was watched, as one line."""
        return f"{VERDICT_WORDS[self.verdict]}: {self.reason} {self.watched}"


def judge_leak(
    rest_bytes: npt.ArrayLike,
    *,
    counter: str = "allocated bytes",
    capacity_bytes: int | None = None,
    num_tokens: npt.ArrayLike | None = None,
    peak_bytes: npt.ArrayLike | None = None,
    reserved_bytes: npt.ArrayLike | None = None,
) -> LeakVerdict:
    """Judge whether memory leaks from its level at rest after each step.

    Args:
        rest_bytes: Bytes after step 1, 2, ...; shape (steps,); NaN where not measured.
        counter: What was measured, for the text.
        capacity_bytes: Where memory ends, to say how many steps are left.
        num_tokens: Token slots of each step's batch, where known; shape (steps,).
        peak_bytes: Highest allocated bytes inside each step, where known; shape (steps,).
        reserved_bytes: What the allocator holds of the device, where known; shape (steps,).
    """
    series = np.asarray(rest_bytes, dtype=np.float64)
    known = np.isfinite(series)
    tokens, peaks, reserved = (_beside(values, known) for values in (num_tokens, peak_bytes, reserved_bytes))
    series = series[known]
    warm_up = max(5, len(series) // 5)
    watched = (
        f"Watched: {counter} at rest after each of {len(series)} steps, the first {min(warm_up, len(series))} as "
        "warm-up. Autograd graphs that hold no tensor data are not counted."
    )
    late = series[warm_up:]
    if len(late) < MIN_STEPS:
        needed = max(MIN_STEPS + 5, math.ceil(MIN_STEPS / 0.8))
        reason = f"{len(series)} of the {needed} steps that a verdict needs."
        return LeakVerdict("too_early", reason, watched, 0.0, None, len(series))
    floors, centers = _window_floors(late)
    # Allocator noise moves the floor by less than this over a whole run; a leak that is smaller is no danger.
    tolerance = max(1.0 * MIB, 0.002 * float(np.median(late)))
    half = len(floors) // 2
    rise, late_rise = floors[-1] - floors[0], floors[-1] - floors[half]
    slope = _theil_sen(centers, floors)
    late_slope = _theil_sen(centers[half:], floors[half:])
    is_rising = float(np.mean(np.diff(floors[half:]) > 0)) >= 0.75
    if rise > tolerance and _follows(late, None if tokens is None else tokens[warm_up:]):
        reason = "memory at rest rises with the tokens of the batches and by nothing else."
        return LeakVerdict("longer_batch", reason, watched, 0.0, None, len(series))
    if late_rise > tolerance / 2 and rise > tolerance and is_rising and late_slope >= LATE_SHARE * slope:
        left = None
        if capacity_bytes:
            left = max(0, int((capacity_bytes - series[-1]) / late_slope))
        reason = f"memory at rest grows by {format_bytes(late_slope)} every step, {format_bytes(rise)} so far."
        if left is not None:
            reason += f" At this rate it is full in {left} steps."
        return LeakVerdict("leak", reason, watched, late_slope, left, len(series))
    wasted = _fragmentation(peaks, reserved)
    if wasted is not None:
        return LeakVerdict("fragmentation", wasted, watched, 0.0, None, len(series))
    early_rise = floors[0] - float(series[0])
    filled = _filled_steps(series, tolerance)
    if filled:
        reason = f"memory at rest rose evenly by {format_bytes(rise)} until step {filled} and has been level since."
        return LeakVerdict("bounded_buffer", reason, watched, 0.0, None, len(series))
    if rise > tolerance or early_rise > tolerance:
        reason = f"memory at rest rose by {format_bytes(max(rise, early_rise))} at first and then stayed level."
        return LeakVerdict("warm_up", reason, watched, 0.0, None, len(series))
    period = _period(late, tolerance)
    if period:
        swing = format_bytes(float(late.max() - late.min()))
        reason = f"memory at rest swings by {swing} every {period} steps and comes back to the same floor."
        return LeakVerdict("periodic", reason, watched, 0.0, None, len(series))
    reason = f"memory at rest stays at {format_bytes(float(np.median(late)))}."
    return LeakVerdict("clean", reason, watched, 0.0, None, len(series))


def leak_finding(verdict: LeakVerdict) -> Finding | None:
    """Return the Finding of a leak, or None for any other verdict."""
    if verdict.verdict != "leak":
        return None
    return Finding(
        kind="leak",
        cause="leak.steady_growth",
        summary=verdict.reason[:1].upper() + verdict.reason[1:],
        evidence={
            "bytes_per_step": verdict.bytes_per_step,
            "steps_until_full": verdict.steps_until_full,
            "num_steps": verdict.num_steps,
        },
        fixes=[Fix("Look for losses, outputs or hidden states that are kept without .detach() or .item().")],
        confidence=0.8,
    )


def _beside(values: npt.ArrayLike | None, known: npt.NDArray[np.bool_]) -> FloatArray | None:
    """Return a companion series at the rows where the level is known; None where it is not complete."""
    if values is None:
        return None
    series = np.asarray(values, dtype=np.float64)
    if series.shape != known.shape or not np.isfinite(series[known]).all():
        return None
    return series[known]


def _follows(levels: FloatArray, tokens: FloatArray | None) -> bool:
    """Whether the tokens explain the levels; where both merely rise with time, what is left over must be flat."""
    if tokens is None or tokens.std() == 0 or levels.std() == 0:
        return False
    if float(np.corrcoef(tokens, levels)[0, 1]) < FOLLOWS:
        return False
    slope, offset = np.polyfit(tokens, levels, 1)
    rest = levels - offset - slope * tokens
    time = np.arange(len(rest), dtype=np.float64)
    return slope > 0 and abs(float(np.polyfit(time, rest, 1)[0])) * len(rest) < 0.1 * float(np.ptp(levels))


def _fragmentation(peaks: FloatArray | None, reserved: FloatArray | None) -> str | None:
    """Return a reason where reserved memory went on rising although no step needed more than an earlier one."""
    if peaks is None or reserved is None or len(peaks) < MIN_STEPS:
        return None
    half = len(peaks) // 2
    gap = float(reserved[-1] - peaks.max())
    grew = float(reserved[-1] - reserved[half])
    needed_more = float(peaks[half:].max() - peaks[:half].max())
    if gap < WASTED_SHARE * float(reserved[-1]) or grew <= max(1.0 * MIB, 2 * needed_more):
        return None
    return (
        f"{format_bytes(gap)} of {format_bytes(float(reserved[-1]))} reserved are used by no step: the allocator's "
        "free memory lies in pieces that do not fit. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    )


def _filled_steps(series: FloatArray, tolerance: float) -> int:
    """Return the step from which on a series that rose evenly is level; 0 where it is no such series."""
    top = float(series[-1])
    below = np.flatnonzero(np.abs(series - top) > tolerance / 4)
    if not len(below) or np.ptp(series[int(below[-1]) + 1 :]) > tolerance / 2:
        return 0
    filled = int(below[-1]) + 1
    rises = np.diff(series[: filled + 1])
    # A warm-up rises ever more slowly; a buffer takes the same at each step until it is full.
    is_even = len(rises) >= 8 and rises.min() > 0 and rises[-3:].mean() > 0.7 * rises[:3].mean()
    return filled + 1 if is_even and len(series) - filled >= 8 and top - series[0] > tolerance else 0


def _period(series: FloatArray, tolerance: float) -> int:
    """Return the period of a series that swings by more than noise; 0 where it has none."""
    centred = series - series.mean()
    if np.ptp(series) < tolerance or not centred.any():
        return 0
    power = float((centred**2).mean())
    for lag in range(2, len(series) // 3 + 1):
        likeness = float((centred[lag:] * centred[:-lag]).mean()) / power
        before = float((centred[lag - 1 :] * centred[: -(lag - 1)]).mean()) / power
        if likeness > MIN_SWING and likeness > before + 0.1:
            return lag
    return 0


def _window_floors(series: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the lowest value and the middle index of each of NUM_WINDOWS equal windows."""
    edges = np.linspace(0, len(series), min(NUM_WINDOWS, len(series) // 2) + 1).astype(int)
    floors = np.array([series[low:high].min() for low, high in itertools.pairwise(edges)])
    return floors, (edges[:-1] + edges[1:]) / 2


def _theil_sen(x: FloatArray, y: FloatArray) -> float:
    """Return the median of the slopes between all pairs of points."""
    first, second = np.triu_indices(len(x), k=1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))
