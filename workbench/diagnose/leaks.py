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


@dataclass(frozen=True, slots=True)
class LeakVerdict:
    """What the leak detector says.

    Attributes:
        verdict: ``"leak"``, ``"warm_up"``, ``"clean"`` or ``"too_early"``.
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
        words = {"leak": "Leak", "warm_up": "Warm-up, no leak", "clean": "No leak", "too_early": "Too early to tell"}
        return f"{words[self.verdict]}: {self.reason} {self.watched}"


def judge_leak(
    rest_bytes: npt.ArrayLike, *, counter: str = "allocated bytes", capacity_bytes: int | None = None
) -> LeakVerdict:
    """Judge whether memory leaks from its level at rest after each step.

    Args:
        rest_bytes: Bytes after step 1, 2, ...; shape (steps,); NaN where not measured.
        counter: What was measured, for the text.
        capacity_bytes: Where memory ends, to say how many steps are left.
    """
    series = np.asarray(rest_bytes, dtype=np.float64)
    series = series[np.isfinite(series)]
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
    if late_rise > tolerance / 2 and rise > tolerance and is_rising and late_slope >= LATE_SHARE * slope:
        left = None
        if capacity_bytes:
            left = max(0, int((capacity_bytes - series[-1]) / late_slope))
        reason = f"memory at rest grows by {format_bytes(late_slope)} every step, {format_bytes(rise)} so far."
        if left is not None:
            reason += f" At this rate it is full in {left} steps."
        return LeakVerdict("leak", reason, watched, late_slope, left, len(series))
    early_rise = floors[0] - float(series[0])
    if rise > tolerance or early_rise > tolerance:
        reason = f"memory at rest rose by {format_bytes(max(rise, early_rise))} at first and then stayed level."
        return LeakVerdict("warm_up", reason, watched, 0.0, None, len(series))
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


def _window_floors(series: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the lowest value and the middle index of each of NUM_WINDOWS equal windows."""
    edges = np.linspace(0, len(series), min(NUM_WINDOWS, len(series) // 2) + 1).astype(int)
    floors = np.array([series[low:high].min() for low, high in itertools.pairwise(edges)])
    return floors, (edges[:-1] + edges[1:]) / 2


def _theil_sen(x: FloatArray, y: FloatArray) -> float:
    """Return the median of the slopes between all pairs of points."""
    first, second = np.triu_indices(len(x), k=1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))
