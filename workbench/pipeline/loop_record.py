"""What the cheap channels of a loop say, step by step, and what its whole course gives away at the end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from torch import Tensor, nn

from ..diagnose.course import find_course_faults, find_repeated_rows
from ..diagnose.finding import Finding
from ..diagnose.speed import SpeedEvidence, find_speed_faults
from .loop_hooks import MicroBatch, StepFacts
from .signals import fingerprints

KEPT_STEPS = 4096


class LoopRecord:
    """Losses, norms, tokens and times of the newest steps.

    Attributes:
        losses: Raw loss per step; NaN where there was none.
        grad_norms: Norm before clipping per step; NaN where unknown.
        clipped: Whether the step clipped.
        tokens: Token slots per step.
        rows: Rows of a micro-batch and number of micro-batches, per step.
        row_tokens: Real tokens per row, in order.
        seen_rows: Fingerprints of rows, in order.
        learning_rates: Rate of each update.
        speed: What the speed doctor judges.
        num_updates: Optimizer steps in all.
        num_steps: Steps in all.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.losses: deque[float] = deque(maxlen=KEPT_STEPS)
        self.grad_norms: deque[float] = deque(maxlen=KEPT_STEPS)
        self.clipped: deque[bool] = deque(maxlen=KEPT_STEPS)
        self.tokens: deque[int] = deque(maxlen=KEPT_STEPS)
        self.rows: deque[tuple[int, int]] = deque(maxlen=KEPT_STEPS)
        self.row_tokens: deque[int] = deque(maxlen=KEPT_STEPS)
        self.seen_rows: deque[int] = deque(maxlen=KEPT_STEPS)
        self.learning_rates: deque[float] = deque(maxlen=KEPT_STEPS)
        self.speed = SpeedEvidence()
        self.num_updates = 0
        self.num_steps = 0
        self._waits = True

    def wait_ended(self, waited_s: float) -> None:
        """Note the time from the last border to the first forward pass; later ones of the step do not count."""
        if self._waits:
            self.speed.data_s += max(0.0, waited_s)
        self._waits = False

    def add(self, loss: float | None, facts: StepFacts, step_s: float) -> None:
        """Take one step in."""
        self._waits = True
        self.num_steps += 1
        speed = self.speed
        speed.step_s.append(step_s)
        self.losses.append(math.nan if loss is None else loss)
        self.grad_norms.append(math.nan if facts.grad_norm is None else facts.grad_norm)
        self.clipped.append(facts.was_clipped)
        trained = [micro for micro in facts.micro_batches if micro.had_grad]
        self.tokens.append(sum(micro.num_tokens for micro in trained or facts.micro_batches))
        self.rows.append((trained[0].num_rows if trained else 0, len(trained)))
        for micro in trained:
            self._add_rows(micro)
        self.num_updates += facts.num_updates
        if facts.learning_rate is not None:
            self.learning_rates.append(facts.learning_rate)
        speed.num_eval_forwards += facts.num_eval_forwards
        if facts.num_training_mode_eval and self.model is not None and recomputes(self.model):
            speed.num_recomputed += facts.num_training_mode_eval

    def _add_rows(self, micro: MicroBatch) -> None:
        self.seen_rows.extend(fingerprints(micro))
        mask = micro.kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.device.type == "cpu":
            lengths = mask.sum(1).tolist()
            self.row_tokens.extend(lengths)
            self.speed.slots.append(micro.num_tokens)
            self.speed.real.append(sum(lengths))
            self.speed.longest.append(max(lengths, default=0))
            self.speed.widths.append(mask.shape[1])
        elif micro.num_rows:
            self.row_tokens.extend([micro.num_tokens // micro.num_rows] * micro.num_rows)

    def rows_of_history(self) -> list[dict[str, float]]:
        """Return the kept steps as rows of metrics, for a panel that is opened late."""
        first = max(0, self.num_steps - len(self.losses))
        # One rate an update: where steps and updates differ, which rate was whose is not known.
        known = len(self.learning_rates) == len(self.losses)
        rates = self.learning_rates if known else [math.nan] * len(self.losses)
        series = zip(self.losses, self.grad_norms, self.tokens, self.speed.step_s, rates, strict=True)
        return [
            {"step": first + index + 1, "loss": loss, "grad_norm": norm, "num_tokens": tokens, "step_s": seconds,
             "learning_rate": rate}
            for index, (loss, norm, tokens, seconds, rate) in enumerate(series)
        ]  # fmt: skip

    def faults(self, *, schedule_steps: int | None, rows_before: Sequence[int] = ()) -> list[Finding]:
        """Return what the whole course gives away.

        Args:
            schedule_steps: By how many steps the learning-rate schedule advanced, or None where it is not known.
            rows_before: Fingerprints of the rows of an interrupted part of the same epoch.
        """
        found = find_speed_faults(self.speed)
        found += find_course_faults(
            losses=list(self.losses),
            grad_norms=list(self.grad_norms),
            clipped=list(self.clipped),
            rows=list(self.rows),
            num_updates=self.num_updates,
            schedule_steps=schedule_steps,
            learning_rates=list(self.learning_rates),
        )
        repeated = find_repeated_rows(list(rows_before), list(self.seen_rows)) if rows_before else None
        return found + ([repeated] if repeated is not None else [])


def recomputes(model: nn.Module) -> bool:
    """Whether a transformers model checkpoints; 5.24 renamed the property and warns of the old name."""
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        value = getattr(model, name, None)
        if value is not None:
            return bool(value)
    return False
