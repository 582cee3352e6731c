"""What a run costs, how busy it keeps the device, and what it learns for its tokens: read from its History."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .history import Floats, History

# Steps that utilization and progress are taken over: enough to see past single batches.
RECENT_STEPS = 50
# Fewer say nothing about a slope.
MIN_STEPS = 5


@dataclass(frozen=True, slots=True)
class Economy:
    """The economy of a run; None where something is not known yet, or at all.

    Attributes:
        cost_usd: Of the run so far: hours of training times the price of its devices.
        usd_per_1000_tokens: ``cost_usd`` by the real tokens so far (padding excluded), times 1,000.
        utilization_mean: Mean share of the recent steps in which the device computed: on a CPU the processor time of
            the process by the length of the step and torch's threads, on a GPU the driver's figure.
        utilization_std: Its standard deviation from step to step: its fluctuation.
        loss_drop_per_1000_tokens: Efficiency of gradient updates, progress per token: by how much the loss falls per
            1,000 learned tokens, the slope of the line through the losses of the recent steps over the tokens learned
            from (least squares, each step weighted by its tokens). Below 0 the loss rises.
    """

    cost_usd: float | None
    usd_per_1000_tokens: float | None
    utilization_mean: float | None
    utilization_std: float | None
    loss_drop_per_1000_tokens: float | None


def measure_economy(history: History) -> Economy:
    """Return the economy of the run behind ``history``."""
    cost = history.last("cost_usd")
    num_tokens = float(np.nansum(history.column("num_tokens")))
    busy = history.column("utilization_fraction")[-RECENT_STEPS:]
    busy = busy[np.isfinite(busy)]
    return Economy(
        cost_usd=cost,
        usd_per_1000_tokens=None if cost is None or not num_tokens else 1000 * cost / num_tokens,
        utilization_mean=float(busy.mean()) if len(busy) else None,
        utilization_std=float(busy.std()) if len(busy) else None,
        loss_drop_per_1000_tokens=_loss_drop(history.column("loss"), history.column("num_supervised_tokens")),
    )


def _loss_drop(losses: Floats, tokens: Floats) -> float | None:
    losses, tokens = losses[-RECENT_STEPS:], tokens[-RECENT_STEPS:]
    length = min(len(losses), len(tokens))
    losses, tokens = losses[:length], tokens[:length]
    known = np.isfinite(losses) & (tokens > 0)
    if known.sum() < MIN_STEPS:
        return None
    losses, weights = losses[known], tokens[known]
    learned = np.cumsum(weights)
    learned = learned - np.average(learned, weights=weights)
    spread = float((weights * learned**2).sum())
    return -1000 * float((weights * learned * losses).sum()) / spread if spread > 0 else None
