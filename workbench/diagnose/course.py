"""What the course of a run gives away: a huge gradient that was not clipped, a batch that shrank, a hasty schedule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from .finding import Finding, Fix, make_finding

OUTLIER_RATIO = 30.0
MIN_BEFORE = 5
MIN_UPDATES = 8


def find_course_faults(
    *,
    losses: Sequence[float],
    grad_norms: Sequence[float],
    clipped: Sequence[bool],
    rows: Sequence[tuple[int, int]],
    num_updates: int,
    schedule_steps: int | None,
    learning_rates: Sequence[float] = (),
) -> list[Finding]:
    """Return faults seen over a whole run.

    Args:
        losses: Raw loss per step.
        grad_norms: Norm before clipping per step; NaN where unknown.
        clipped: Whether the step clipped.
        rows: Rows of a micro-batch and number of micro-batches, per step.
        num_updates: Optimizer steps in all.
        schedule_steps: By how many steps the schedule advanced, or None where it is not known.
        learning_rates: Rate of each update, where known.
    """
    found = [
        _outlier(losses, grad_norms, clipped),
        _batch(rows),
        _schedule(num_updates, schedule_steps),
        _frozen(losses, num_updates, learning_rates),
    ]
    return [finding for finding in found if finding is not None]


def _outlier(losses: Sequence[float], norms: Sequence[float], clipped: Sequence[bool]) -> Finding | None:
    for index, norm in enumerate(norms):
        before = [value for value in norms[:index] if math.isfinite(value)]
        if len(before) < MIN_BEFORE or not math.isfinite(norm) or clipped[index]:
            continue
        median = float(np.median(before))
        if median <= 0 or norm < OUTLIER_RATIO * median:
            continue
        after = [value for value in losses[index + 1 : index + 4] if math.isfinite(value)]
        usual = float(
            np.median([value for value in losses[max(0, index - 5) : index] if math.isfinite(value)] or [0.0])
        )
        text = f" The loss was {usual:.3g} before and {after[0]:.3g} after." if after else ""
        return make_finding(
            "loss.outlier_batch",
            f"Step {index + 1}: the gradient norm {norm:.3g} is {norm / median:.0f} times the median and was not "
            f"clipped.{text}",
            where={"step": index + 1},
            evidence={"grad_norm": norm, "median_grad_norm": median},
            fixes=[Fix("Clip the gradient norm at 1.0.", {"training.max_grad_norm": 1.0})],
        )
    return None


def _frozen(losses: Sequence[float], num_updates: int, rates: Sequence[float]) -> Finding | None:
    """Find a loss that was bit for bit the same from the first step to the last although updates were made."""
    # A loss that settles at a value has come from another one: only a run that never moved is meant.
    if num_updates < MIN_UPDATES or len(losses) < MIN_UPDATES or len(set(losses)) != 1 or not math.isfinite(losses[0]):
        return None
    is_zero_rate = bool(rates) and max(rates) == 0.0
    why = " The learning rate was 0 in each of them." if is_zero_rate else ""
    return make_finding(
        "loss.frozen",
        f"The loss was exactly {losses[0]:.6g} in all {len(losses)} steps although {num_updates} updates were "
        f"made.{why}",
        evidence={"loss": losses[0], "num_updates": num_updates, "highest_learning_rate": max(rates, default=None)},
        fixes=[Fix("See why the schedule gives 0.")] if is_zero_rate else [],
        confidence=0.9,
    )


def _batch(rows: Sequence[tuple[int, int]]) -> Finding | None:
    """Find a micro-batch that shrank for good by a whole factor while the accumulation stayed."""
    seen = [pair for pair in rows if pair[0] > 0 and pair[1] > 0]
    for border in range(2, len(seen) - 1):
        before, after = Counter(seen[:border]).most_common(1)[0], Counter(seen[border:]).most_common(1)[0]
        (rows_before, count_before), times_before = before
        (rows_after, count_after), times_after = after
        is_stable = times_before >= 2 and times_after >= 3 and times_after >= 0.9 * (len(seen) - border)
        if times_before < 0.9 * border or not is_stable or seen[border] != after[0] or seen[border - 1] != before[0]:
            continue
        shrank = rows_after < rows_before and rows_before % rows_after == 0
        if shrank and count_after == count_before and _never_returns(seen[border:], rows_after):
            return make_finding(
                "training.effective_batch",
                f"The micro-batch went from {rows_before} to {rows_after} rows and accumulation "
                f"stayed at {count_after}: "
                f"the effective batch is {rows_after * count_after} instead of {rows_before * count_before}.",
                where={"step": border + 1},
                evidence={"before": rows_before * count_before, "after": rows_after * count_after},
                fixes=[
                    Fix(
                        f"Set gradient_accumulation_steps={count_before * rows_before // rows_after}.",
                        {"training.gradient_accumulation_steps": count_before * rows_before // rows_after},
                    )
                ],
            )
    return None


def _never_returns(rest: Sequence[tuple[int, int]], rows: int) -> bool:
    return all(pair[0] <= rows for pair in rest) and len(rest) >= 3


def _schedule(num_updates: int, schedule_steps: int | None) -> Finding | None:
    if schedule_steps is None or num_updates < 4 or schedule_steps < 1.5 * num_updates:
        return None
    ratio = schedule_steps / num_updates
    return make_finding(
        "training.schedule",
        f"The learning-rate schedule advanced {schedule_steps} steps in {num_updates} optimizer "
        f"steps: {ratio:.1f} times "
        "too fast, so it ends early.",
        evidence={"schedule_steps": schedule_steps, "optimizer_steps": num_updates},
        confidence=0.95,
    )


def find_repeated_rows(before: Sequence[int], after: Sequence[int]) -> Finding | None:
    """Return a finding when rows of the interrupted part come again in its continuation.

    Args:
        before: Fingerprints of the rows of the interrupted part, in order.
        after: Those of the continuation within the same epoch.
    """
    if not before or not after:
        return None
    known = set(before)
    again = sum(row in known for row in after)
    # Data sets hold duplicates; a restored order repeats none of the rows it has used.
    if again < 0.2 * len(after) or len(known) < 4:
        return None
    return make_finding(
        "resume.data_order",
        f"{again} of the {len(after)} rows seen after resuming were already used in this epoch.",
        evidence={"num_repeated": again, "num_rows": len(after)},
        confidence=0.9,
    )
