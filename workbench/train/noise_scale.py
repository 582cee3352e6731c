"""An effective batch that follows the gradient noise: ``policies.batch=noise_scale``.

The simple noise scale is the number of supervised tokens at which the noise of a step's gradient is as large as the
gradient: smaller batches waste steps, larger ones waste tokens. It is measured from two norms that every step has, that
of its first micro-batch and that of all of them together. The learning rate stays as the schedule says: a batch that
grows takes the place of a rate that decays.

Source:
    McCandlish et al., An Empirical Model of Large-Batch Training, arXiv:1812.06162, appendix A.1: unbiased estimates of
    |G|^2 and tr(Sigma) from two batch sizes. Smith et al., arXiv:1711.00489: growing the batch, not decaying the rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from ..recipe import Recipe

# Steps whose norms are averaged: single estimates scatter by more than their size.
WINDOW_STEPS = 50
# Steps between two changes, and before the first.
CHANGE_EVERY_STEPS = 20
# At most this factor in one change, and none for less than DEAD_BAND.
MAX_FACTOR = 2.0
DEAD_BAND = 1.25


class NoiseScale:
    """Measures the noise scale and says how many micro-batches a step takes.

    Attributes:
        num_micro_batches: Of a step, now.
        epoch: Epoch of the newest step.
        num_taken: Micro-batches of that epoch that steps have used.
    """

    def __init__(self, recipe: Recipe) -> None:
        """Begin with the Recipe's accumulation.

        Args:
            recipe: Says bounds and begin.
        """
        policies = recipe.policies
        self._low, self._high = policies.min_accumulation, policies.max_accumulation
        self.num_micro_batches = recipe.training.gradient_accumulation_steps
        self.epoch, self.num_taken = 0, 0
        self._noises: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._signals: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._tokens: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._steps_since_change = 0

    def record(self, small: tuple[float, int], large: tuple[float, int], num_micro_batches: int) -> None:
        """Take the two norms of a step.

        Args:
            small: Squared norm of the mean gradient over the tokens of the first micro-batch, and those tokens.
            large: The same of the whole step.
            num_micro_batches: Of the step.
        """
        self._steps_since_change += 1
        (small_square, few), (large_square, many) = small, large
        if not 0 < few < many:
            return
        self._signals.append((many * large_square - few * small_square) / (many - few))
        self._noises.append((small_square - large_square) / (1 / few - 1 / many))
        self._tokens.append(many / num_micro_batches)

    @property
    def tokens(self) -> float | None:
        """The noise scale in supervised tokens; None before it is measured, infinite where noise hides the gradient."""
        if len(self._signals) < CHANGE_EVERY_STEPS:
            return None
        signal, noise = sum(self._signals) / len(self._signals), sum(self._noises) / len(self._noises)
        return max(0.0, noise) / signal if signal > 0 else float("inf")

    def change(self) -> int | None:
        """Return the micro-batches of a step from now on where they change, else None; after each step."""
        scale = self.tokens
        if scale is None or self._steps_since_change < CHANGE_EVERY_STEPS:
            return None
        now = self.num_micro_batches
        wanted = scale / (sum(self._tokens) / len(self._tokens))
        wanted = min(max(wanted, now / MAX_FACTOR), now * MAX_FACTOR)
        target = min(max(round(wanted), self._low), self._high)
        if max(target, now) < DEAD_BAND * min(target, now):
            return None
        self.num_micro_batches, self._steps_since_change = target, 0
        return target

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain JSON values."""
        return {
            "num_micro_batches": self.num_micro_batches,
            "epoch": self.epoch,
            "num_taken": self.num_taken,
            "noises": list(self._noises),
            "signals": list(self._signals),
            "tokens": list(self._tokens),
            "steps_since_change": self._steps_since_change,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state()``."""
        self.num_micro_batches = int(state["num_micro_batches"])
        self.epoch, self.num_taken = int(state["epoch"]), int(state["num_taken"])
        self._noises = deque(state["noises"], maxlen=WINDOW_STEPS)
        self._signals = deque(state["signals"], maxlen=WINDOW_STEPS)
        self._tokens = deque(state["tokens"], maxlen=WINDOW_STEPS)
        self._steps_since_change = int(state["steps_since_change"])
