"""What makes steps slower than they need be, from counts of tokens and times of the user's own run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .finding import Finding, make_finding

MIN_STEPS = 4
REAL_SHARE = 0.5  # Below this, more slots are padding than tokens.


KEPT = 4096  # Newest steps and micro-batches; a watch must not grow with the run it watches.


def _series() -> deque[Any]:
    return deque(maxlen=KEPT)


@dataclass
class SpeedEvidence:
    """Per step of a run.

    Attributes:
        slots: Token slots (rows times length).
        real: Real tokens, where an attention mask says so.
        longest: Longest real row of each batch.
        widths: Length of each batch.
        step_s: Wall time.
        gc_s: Time in full garbage collections that the loop asked for.
        num_gc: How many.
        num_empty_cache: Calls of empty_cache.
        data_s: Time between the end of a step and the next forward pass.
        num_eval_forwards: Forward passes without gradients.
        num_recomputed: Of them, layers that ran through checkpointing.
    """

    slots: deque[int] = field(default_factory=_series)
    real: deque[int] = field(default_factory=_series)
    longest: deque[int] = field(default_factory=_series)
    widths: deque[int] = field(default_factory=_series)
    step_s: deque[float] = field(default_factory=_series)
    gc_s: float = 0.0
    num_gc: int = 0
    num_empty_cache: int = 0
    data_s: float = 0.0
    num_eval_forwards: int = 0
    num_recomputed: int = 0


def find_speed_faults(seen: SpeedEvidence) -> list[Finding]:
    """Return what is slow about a run; empty when nothing is."""
    findings = [_padding(seen), _garbage(seen), _empty_cache(seen), _evaluation(seen), _data(seen)]
    return [finding for finding in findings if finding is not None]


def _padding(seen: SpeedEvidence) -> Finding | None:
    slots, real = sum(seen.slots), sum(seen.real)
    if len(seen.slots) < MIN_STEPS or not slots or not real or real / slots >= REAL_SHARE:
        return None
    rows = [slot / max(1, width) for slot, width in zip(seen.slots, seen.widths, strict=True)]
    dynamic = sum(count * longest for count, longest in zip(rows, seen.longest, strict=True))
    share, better = real / slots, real / max(1.0, dynamic)
    if dynamic > 0.8 * slots:
        return None  # Already padded to the longest of each batch.
    return make_finding(
        "speed.padding",
        f"Only {100 * share:.0f} % of the {slots} token slots are real. Padding per batch would make it "
        f"{100 * better:.0f} %: about {slots / dynamic:.1f} times fewer to compute.",
        evidence={"real_fraction": share, "dynamic_fraction": better, "num_slots": slots},
        confidence=0.95,
    )


def _garbage(seen: SpeedEvidence) -> Finding | None:
    total = float(sum(seen.step_s))
    if len(seen.step_s) < MIN_STEPS or seen.num_gc < 0.8 * len(seen.step_s) or not total or seen.gc_s < 0.05 * total:
        return None
    per_step = seen.gc_s / len(seen.step_s)
    return make_finding(
        "speed.gc_every_step",
        f"gc.collect() takes {1000 * per_step:.0f} ms of a {1000 * total / len(seen.step_s):.0f} ms step "
        f"({100 * seen.gc_s / total:.0f} %).",
        evidence={"gc_s_per_step": per_step, "num_calls": seen.num_gc},
        confidence=0.95,
    )


def _empty_cache(seen: SpeedEvidence) -> Finding | None:
    if len(seen.step_s) < MIN_STEPS or seen.num_empty_cache < 0.8 * len(seen.step_s):
        return None
    return make_finding(
        "speed.empty_cache_every_step",
        f"torch.cuda.empty_cache() ran {seen.num_empty_cache} times in {len(seen.step_s)} steps.",
        evidence={"num_calls": seen.num_empty_cache},
    )


def _evaluation(seen: SpeedEvidence) -> Finding | None:
    if not seen.num_recomputed:
        return None
    return make_finding(
        "speed.checkpointing_in_eval",
        f"Gradient checkpointing ran in {seen.num_eval_forwards} forward passes without gradients, "
        f"where it only costs.",
        evidence={"num_forwards": seen.num_eval_forwards, "num_checkpointed_layers": seen.num_recomputed},
    )


def _data(seen: SpeedEvidence) -> Finding | None:
    total = float(np.sum(seen.step_s))
    if len(seen.step_s) < 3 * MIN_STEPS or not total or seen.data_s < 0.4 * total or total / len(seen.step_s) < 0.02:
        return None
    return make_finding(
        "speed.data_wait",
        f"{100 * seen.data_s / total:.0f} % of the time passes between a step and the next forward "
        f"pass: steps wait for "
        "data.",
        evidence={"data_s": seen.data_s, "total_s": total},
        confidence=0.7,
    )
