"""How fast a run is, how much of its work is padding, and when it ends: read from its History."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .history import Floats, History

# Steps the present speed is taken over: enough for batches of different length, few enough to follow a change.
RECENT_STEPS = 50


@dataclass(frozen=True, slots=True)
class Throughput:
    """The speed of a run.

    Attributes:
        step_s: Median seconds of the recent steps; None before the first.
        tokens_per_s: Real tokens per second over the recent steps; None before the first.
        padding_fraction: Share of padding in all tokens computed so far; None before the first.
        supervised_fraction: Share of learned tokens in the real ones so far; None before the first.
        num_tokens: Real tokens so far.
        elapsed_s: Seconds of training so far, pauses left out.
        remaining_s: Seconds left at the present speed, evaluations and checkpoints included; None where not known.
    """

    step_s: float | None
    tokens_per_s: float | None
    padding_fraction: float | None
    supervised_fraction: float | None
    num_tokens: int
    elapsed_s: float
    remaining_s: float | None


def measure_throughput(history: History, num_steps: int | None = None) -> Throughput:
    """Return how fast the run behind ``history`` is.

    Args:
        history: The run's history.
        num_steps: Optimizer steps of the whole run, or None.
    """
    times = history.column("step_s")
    tokens, padding = history.column("num_tokens"), history.column("num_padding_tokens")
    recent_s = _present(times[-RECENT_STEPS:])
    num_tokens, num_padding = float(np.nansum(tokens)), float(np.nansum(padding))
    supervised = float(np.nansum(history.column("num_supervised_tokens")))
    seconds = float(recent_s.sum())
    step_s = float(np.median(recent_s)) if len(recent_s) else None
    return Throughput(
        step_s=step_s,
        tokens_per_s=float(np.nansum(tokens[-RECENT_STEPS:])) / seconds if seconds > 0 else None,
        padding_fraction=num_padding / (num_tokens + num_padding) if num_tokens + num_padding > 0 else None,
        supervised_fraction=supervised / num_tokens if num_tokens > 0 else None,
        num_tokens=int(num_tokens),
        elapsed_s=history.last("elapsed_s") or 0.0,
        remaining_s=_remaining_s(history, step_s, num_steps),
    )


def _remaining_s(history: History, step_s: float | None, num_steps: int | None) -> float | None:
    """Return seconds left: the wall-clock rate over the recent rows, so that what happens between steps counts too."""
    done = history.last("step")
    if num_steps is None or done is None or step_s is None:
        return None
    left = max(0.0, num_steps - done)
    elapsed, steps = history.column("elapsed_s")[-RECENT_STEPS:], history.column("step")[-RECENT_STEPS:]
    if len(steps) > 1 and steps[-1] > steps[0]:
        rate = float(elapsed[-1] - elapsed[0]) / float(steps[-1] - steps[0])
        if np.isfinite(rate) and rate > 0:
            return left * max(rate, step_s)
    return left * step_s


def _present(values: Floats) -> Floats:
    return values[~np.isnan(values)]
