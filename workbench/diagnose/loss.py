"""What the raw loss gives away: NaN, Inf, exactly zero, frozen."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .finding import Finding, Fix

NUM_REPEATS = 4


def find_loss_faults(steps: npt.ArrayLike, losses: npt.ArrayLike, grad_norms: npt.ArrayLike) -> list[Finding]:
    """Return findings about the raw loss and gradient norm of each step.

    Args:
        steps: Optimizer steps; shape (rows,).
        losses: Raw loss of each step; shape (rows,); NaN means not finite.
        grad_norms: Gradient norm before clipping; shape (rows,).
    """
    step, loss, norm = (np.asarray(values, dtype=np.float64) for values in (steps, losses, grad_norms))
    findings: list[Finding] = []
    for name, values, cause in (("loss", loss, "nonfinite.loss"), ("gradient norm", norm, "nonfinite.gradient")):
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            first = int(step[bad[0]])
            findings.append(
                Finding(
                    kind="nonfinite",
                    cause=cause,
                    summary=f"The {name} was NaN or Inf first in step {first}; the update was not applied.",
                    where={"step": first},
                    evidence={"num_steps": len(bad), "value": float(values[bad[0]])},
                    fixes=[Fix("Lower the learning rate."), Fix("Use bf16 or float32 instead of fp16.")],
                    confidence=1.0,
                )
            )
            return findings
    zero = np.flatnonzero(loss == 0.0)
    if len(zero):
        findings.append(
            Finding(
                kind="data",
                cause="loss.exactly_zero",
                summary=f"The loss of step {int(step[zero[0]])} is exactly 0: a batch without supervised tokens "
                "or a loss that was filtered.",
                where={"step": int(step[zero[0]])},
                evidence={"num_steps": len(zero)},
                fixes=[Fix("Look at the preview: how many tokens of each row are supervised?")],
                confidence=0.9,
            )
        )
    elif len(loss) >= NUM_REPEATS and np.all(loss[-NUM_REPEATS:] == loss[-1]):
        findings.append(
            Finding(
                kind="data",
                cause="loss.frozen",
                summary=f"The loss has been exactly {loss[-1]:.6g} for {NUM_REPEATS} steps: nothing changes.",
                where={"step": int(step[-1])},
                evidence={"loss": float(loss[-1])},
                fixes=[Fix("See whether the trained parameters are those in the optimizer.")],
                confidence=0.7,
            )
        )
    return findings
