"""Steps whose loss stands out of the steps before them: found as they happen, and told with their rows.

Median and median absolute deviation (MAD) are the measure, not mean and standard deviation: those a spike would raise
itself, so that the second one of a run would no longer stand out.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Steps before the present one that it is compared with.
WINDOW_STEPS = 50
# Of fewer, the spread says too little: a run's first steps would be spikes of each other.
MIN_STEPS = 20
# Makes the MAD of normally distributed values their standard deviation (1 / 0.6745).
MAD_SCALE = 1.4826
# The spread counts as at least this fraction of the median: of a loss that has stopped moving every digit would be one.
MIN_SPREAD_FRACTION = 1e-3
# Rows whose text an event holds, and how much of each; the numbers of all are there.
SHOWN_ROWS = 16
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Spike:
    """A loss above the limit.

    Attributes:
        loss: Raw loss of the step.
        median: Of the losses before it.
        limit: ``median + factor * 1.4826 * MAD``; the loss is above it.
        damping: What brings its gradient norm down to the median norm of the steps before; at most 1.
    """

    loss: float
    median: float
    limit: float
    damping: float


class SpikeDetector:
    """Judges each step by the steps before it.

    Every finite loss joins the window, a spike too: a loss that has moved to another level for good is then the usual
    one after half a window, instead of being a spike for the rest of the run.
    """

    def __init__(self, factor: float) -> None:
        """Make a detector.

        Args:
            factor: Robust standard deviations above the median at which a spike begins.
        """
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._norms: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.num_spikes = 0
        self.num_skipped = 0  # Steps that were left out.

    def judge(self, loss: float, norm: float) -> Spike | None:
        """Return the spike that a step is, or None.

        Args:
            loss: Its raw loss, finite.
            norm: Norm of its gradients before clipping, finite.
        """
        if len(self._losses) < MIN_STEPS:
            return None
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(value - median) for value in self._losses)
        spread = max(MAD_SCALE * deviation, MIN_SPREAD_FRACTION * abs(median))
        limit = median + self._factor * spread
        if loss <= limit:
            return None
        usual_norm = statistics.median(self._norms)
        return Spike(loss, median, limit, min(1.0, usual_norm / norm) if norm > 0 else 1.0)

    def record(self, loss: float | None, norm: float) -> None:
        """Take a step that is done into the window; one without a learned token or a finite value stays out."""
        if loss is not None and math.isfinite(loss) and math.isfinite(norm):
            self._losses.append(loss)
            self._norms.append(norm)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain JSON values."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "num_spikes": self.num_spikes,
            "num_skipped": self.num_skipped,
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from ``state()``; None, of a checkpoint that has none, begins anew."""
        state = state or {}
        self._losses = deque(state.get("losses", ()), maxlen=WINDOW_STEPS)
        self._norms = deque(state.get("norms", ()), maxlen=WINDOW_STEPS)
        self.num_spikes, self.num_skipped = state.get("num_spikes", 0), state.get("num_skipped", 0)


_DONE = {
    "keep": "It was learned from like any other step.",
    "skip": "No weight was updated.",
    "damp": "Its gradients were scaled by {damping:.3g}.",
}


def spike_event(spike: Spike, policy: str, step: int, rows: Sequence[int], texts: Sequence[str]) -> dict[str, Any]:
    """Return the data of a ``"spike"`` event.

    Args:
        spike: What was seen.
        policy: ``policies.on_spike``.
        step: The optimizer step.
        rows: Numbers of its training samples.
        texts: How the first of them begin.
    """
    done = _DONE[policy].format(damping=spike.damping)
    shown = ", ".join(str(row) for row in rows[:SHOWN_ROWS])
    more = f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    return {
        "step": step,
        "loss": spike.loss,
        "median": spike.median,
        "limit": spike.limit,
        "damping": spike.damping if policy == "damp" else 1.0,
        "policy": policy,
        "rows": list(rows),
        "texts": list(texts),
        "message": f"Step {step}: the loss {spike.loss:.4g} stands out of the steps before (median {spike.median:.4g}, "
        f"limit {spike.limit:.4g}). {done} Training samples {shown}{more}.",
    }


def begin_of(sample: Mapping[str, Any], tokenizer: Any) -> str:
    """Return how a training sample begins, as one line of plain text; empty where the tokenizer cannot say.

    Args:
        sample: With ``input_ids``.
        tokenizer: Of the model, or its processor.
    """
    decode = getattr(tokenizer, "decode", None)
    if decode is None:
        return ""
    # Hardly any token is less than a character: so many are enough, and a long sample costs no more than a short one.
    text = str(decode(list(sample["input_ids"][:SHOWN_CHARACTERS])))
    plain = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(plain.split())[:SHOWN_CHARACTERS]
