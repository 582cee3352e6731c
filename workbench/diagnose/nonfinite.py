"""Verdict on a NaN or Inf from what was kept and replayed, in a fixed order.

The order matters: weights that are already bad blame an earlier step, a clip with a bad norm spreads one bad entry to
all, and only then does the first bad operator of the replay name the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..observe.finiteness import BadOp
from .finding import Finding, Fix, make_finding

FP16_MAX = 65504.0
DIVERGED = 1e4  # A loss so many times the lowest is no noise.


@dataclass
class NonFiniteEvidence:
    """What is known when the alarm fires.

    Attributes:
        step: Step of the alarm.
        loss: Raw loss.
        grad_norm: Norm before clipping, or None.
        num_parameters: Parameters in all.
        bad_weights: Names of parameters that were not finite before the step.
        bad_gradients: Names whose gradient was not finite before clipping.
        last_update: What the last applied update was: ``eps``, ``lr``, ``dtypes``, ``grad_norm``, ``step``,
            ``optimizer``.
        median_grad_norm: Of the steps before.
        earlier_losses: Finite raw losses of the steps before, in order.
        replayed: Whether the step could be run again.
        replay_is_finite: The replay gave a finite loss and finite gradients.
        created: Operators that made the first non-finite values, in order.
        first_nan: First operator with NaN out and none in.
        max_forward: Largest finite magnitude in the forward pass.
        rows: Rows of the batch that are bad by themselves.
        num_rows: Rows in the batch.
        tokens: Token ids at the bad place.
        num_supervised: Supervised tokens of the batch, or None.
        bad_inputs: Names of float inputs of the batch that hold NaN or Inf.
        bad_embedding_rows: Token id to ``"nan"`` for rows of the batch whose embedding is bad.
        was_blocked: Whether the update was kept from the weights.
        anomaly_node: Where the non-finite value surfaces in backward.
    """

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    num_parameters: int = 0
    bad_weights: Sequence[str] = ()
    bad_gradients: Sequence[str] = ()
    last_update: dict[str, Any] = field(default_factory=dict)
    median_grad_norm: float | None = None
    earlier_losses: Sequence[float] = ()
    replayed: bool = False
    replay_is_finite: bool = False
    created: Sequence[BadOp] = ()
    first_nan: BadOp | None = None
    max_forward: float = 0.0
    rows: Sequence[int] = ()
    num_rows: int = 0
    tokens: Sequence[int] = ()
    num_supervised: int | None = None
    bad_inputs: Sequence[str] = ()
    bad_embedding_rows: Sequence[int] = ()
    was_blocked: bool = False
    anomaly_node: str = ""


def judge_nonfinite(seen: NonFiniteEvidence) -> Finding:
    """Return the one finding that explains a NaN or Inf."""
    finding = (
        _bad_weights(seen)
        or _labels(seen)
        or _data(seen)
        or _diverged(seen)
        or _first_operator(seen)
        or _clipping(seen)
        or _other(seen)
    )
    where = {"step": seen.step, **finding.where}
    if seen.rows:
        where["batch_rows"] = tuple(seen.rows)
    if seen.tokens and "token_ids" not in where:
        where["token_ids"] = tuple(seen.tokens[:8])
    evidence = {
        "loss": seen.loss,
        "grad_norm": seen.grad_norm,
        "update_blocked": seen.was_blocked,
        "num_bad_weights": len(seen.bad_weights),
        **finding.evidence,
    }
    return Finding(
        finding.kind, finding.cause, finding.summary, where, evidence, finding.fixes, finding.confidence, True
    )


def _bad_weights(seen: NonFiniteEvidence) -> Finding | None:
    if not seen.bad_weights:
        return None
    names, update = list(seen.bad_weights), seen.last_update
    where = {"parameter": names[0]}
    if seen.bad_embedding_rows and len(names) <= 2:
        ids = tuple(seen.bad_embedding_rows)
        return make_finding(
            "nonfinite.embedding_row",
            f"Token id {ids[0]} has a NaN embedding row in {names[0]} and occurs in this batch: it was never trained.",
            where=where | {"token_ids": ids},
            confidence=1.0,
        )
    if not update:
        return make_finding(
            "nonfinite.weights_before",
            f"{len(names)} of {seen.num_parameters} parameters were NaN or Inf before the first watched step, first "
            f"{names[0]}.",
            where=where,
        )
    step, eps = update.get("step", seen.step - 1), update.get("eps")
    halves = [dtype for dtype in update.get("dtypes", ()) if dtype in (torch.float16, torch.bfloat16)]
    norm, median = update.get("grad_norm"), seen.median_grad_norm
    if halves and eps is not None and float(torch.tensor(eps, dtype=halves[0])) == 0.0:
        dtype = str(halves[0]).removeprefix("torch.")
        return make_finding(
            "nonfinite.optimizer_update",
            f"Gradients of step {step} were finite but the update was not: eps={eps:g} is 0 in {dtype}, so "
            f"{len(names)} parameters became Inf or NaN, first {names[0]}.",
            where=where | {"update_of_step": step},
            evidence={"eps": eps, "dtype": dtype},
            fixes=[Fix("Keep weights and optimizer state in float32."), Fix("Set adam_epsilon=1e-4 as a stop-gap.")],
            confidence=0.95,
        )
    grew = norm is not None and median is not None and median > 0 and norm > 10 * median
    return make_finding(
        "nonfinite.learning_rate",
        f"The weights became NaN or Inf in the update of step {step} at learning rate {update.get('lr'):g}"
        + (
            f"; its gradient norm {norm:.3g} was {norm / median:.0f} times the median."
            if grew and norm and median
            else "."
        ),
        where=where | {"update_of_step": step},
        evidence={"learning_rate": update.get("lr")},
        confidence=0.8,
    )


def _labels(seen: NonFiniteEvidence) -> Finding | None:
    if seen.num_supervised != 0:
        return None
    return make_finding(
        "nonfinite.labels",
        "No token of this batch is supervised: every label is -100, so the mean is 0/0. No weight was changed by it.",
        evidence={"num_supervised_tokens": 0},
        confidence=1.0,
    )


def _data(seen: NonFiniteEvidence) -> Finding | None:
    if not seen.bad_inputs:
        return None
    return make_finding(
        "nonfinite.data_row",
        f"The batch itself holds NaN or Inf in {seen.bad_inputs[0]!r}.",
        where={"input": seen.bad_inputs[0]},
        confidence=1.0,
    )


def _diverged(seen: NonFiniteEvidence) -> Finding | None:
    """Find a run that blew up over several steps: the operator that overflows in the end is not to blame."""
    losses, rate = list(seen.earlier_losses), seen.last_update.get("lr")
    if len(losses) < 3 or not rate:
        return None
    grown = losses[-1] > losses[-2] > losses[-3]
    lowest = min(abs(value) for value in losses)
    # float16 ends at 65504, which a sound run may reach; other dtypes end where only a run that diverges comes.
    ends_high = not any(op.dtype == "float16" for op in seen.created) and losses[-1] > DIVERGED * max(lowest, 1e-6)
    if not (grown and ends_high):
        return None
    return make_finding(
        "nonfinite.learning_rate",
        f"The run diverged: at learning rate {rate:g} the loss grew from {losses[-3]:.3g} over {losses[-2]:.3g} to "
        f"{losses[-1]:.3g} before it overflowed in step {seen.step}.",
        evidence={"learning_rate": rate, "losses": tuple(losses[-3:])},
        confidence=0.85,
    )


def _first_operator(seen: NonFiniteEvidence) -> Finding | None:
    created = [op for op in seen.created if op.value != "-inf" or "add" in op.op or "log" in op.op]
    first_nan = seen.first_nan
    if not created and first_nan is None:
        return None
    op = created[0] if created else first_nan
    assert op is not None
    where: dict[str, Any] = {"op": op.op, "module": op.module, "phase": op.phase, "line": op.line, "node": op.node}
    evidence: dict[str, Any] = {
        "value": op.value,
        "dtype": op.dtype,
        "largest_input": op.largest_input,
        "largest_in_float32": op.fp32_largest,
        "surfaces_at": first_nan.op if first_nan is not None else op.op,
    }

    cause, summary, confidence = _explain_operator(op, seen)
    if op.index_inputs:
        where["token_ids"] = op.index_inputs[:8]
    return make_finding(cause, summary, where=where, evidence=evidence, confidence=confidence)


def _explain_operator(op: BadOp, seen: NonFiniteEvidence) -> tuple[str, str, float]:
    """Return cause, sentence and confidence for the operator that made the first bad value."""
    name = op.op.removeprefix("aten.")
    if op.phase == "backward":
        return _explain_backward(op, seen)
    if "embedding" in name:
        return "nonfinite.embedding_row", f"Token ids {op.index_inputs[:5]} have NaN embedding rows.", 1.0
    limit = torch.finfo(getattr(torch, op.dtype)).max if op.dtype else float("inf")
    if op.value == "-inf" and "add" in name and op.largest_input > 0.4 * limit:
        text = (
            f"The additive mask holds -inf although each part is finite: two minimum masks were summed in {op.dtype}; "
            "a fully masked row then gives NaN."
        )
        return "nonfinite.summed_masks", text, 0.9
    if "log_softmax" in name and op.dtype == "float16":
        text = f"Log-probabilities of float16 logits (largest {op.largest_input:.4g}) are the first non-finite values."
        return "nonfinite.fp16_log_probs", text, 0.9
    if name.startswith(("log", "div", "reciprocal")) and op.has_zero_operand:
        return "nonfinite.log_of_zero", f"{name} of 0 at {op.line}: its argument underflowed to exactly 0.", 0.95
    if op.dtype == "float16":
        return _explain_half(op)
    if "softmax" in name and op.all_masked_rows:
        return "nonfinite.masked_attention", f"Softmax over {op.all_masked_rows} rows that are fully masked.", 0.9
    if "nll_loss" in name or "cross_entropy" in name:
        return "nonfinite.labels", "The loss divides by zero supervised tokens.", 0.9
    return "nonfinite.other", f"First non-finite value: {_place(op)}, inputs finite, output {op.value}.", 0.8


def _explain_backward(op: BadOp, seen: NonFiniteEvidence) -> tuple[str, str, float]:
    place = op.node or op.op
    if op.dtype == "float16" or op.largest_input > 1e30 or (op.fp32_largest or 0) > FP16_MAX:
        text = (
            f"The forward is finite everywhere (largest {seen.max_forward:.4g}); the first non-finite gradient appears "
            f"going backward at {place}."
        )
        return "nonfinite.backward_overflow", text, 0.9
    text = (
        f"The forward is finite; the derivative at {place} is not: a root, power, logarithm or exponential at its "
        "singular point."
    )
    return "nonfinite.backward_singular", text, 0.9


def _explain_half(op: BadOp) -> tuple[str, str, float]:
    size = f"{op.fp32_largest:.4g}" if op.fp32_largest else "more"
    if "bmm" in op.op and ("attn" in op.module.lower() or "attention" in op.module.lower()):
        text = (
            f"First non-finite: the attention score product in '{op.module}' (largest {size} in float32, "
            "float16 ends at 65504)."
        )
        return "nonfinite.fp16_attention", text, 0.95
    text = (
        f"First non-finite value: {_place(op)}, inputs finite, output {op.value}. In float32 its largest is {size}, "
        "float16 ends at 65504."
    )
    return "nonfinite.fp16_overflow", text, 0.95


def _place(op: BadOp) -> str:
    name = op.op.removeprefix("aten.")
    return f"module '{op.module}' (op {name})" if op.module else f"op {name}"


def _clipping(seen: NonFiniteEvidence) -> Finding | None:
    norm = seen.grad_norm
    if norm is None or (norm == norm and abs(norm) != float("inf")):
        return None
    if not seen.bad_gradients:
        return make_finding(
            "nonfinite.clip_no_op",
            "Every gradient is finite but so large that their norm overflows to Inf: clipping sets all of them to 0 "
            "and the step changes nothing.",
        )
    kind = (
        "NaN: every gradient becomes NaN"
        if norm != norm
        else "Inf: every clean gradient becomes 0 and the bad entry NaN"
    )
    return make_finding(
        "nonfinite.clipping",
        f"The gradient norm is not finite, from {seen.bad_gradients[0]} ({len(seen.bad_gradients)} of "
        f"{seen.num_parameters} parameters). Clipping by it would spread it: {kind}.",
        where={"parameter": seen.bad_gradients[0]},
    )


def _other(seen: NonFiniteEvidence) -> Finding:
    if seen.replayed and seen.replay_is_finite and not seen.bad_gradients:
        return make_finding(
            "nonfinite.logging_only",
            "The step run again is finite and no weight or gradient is bad: only the reported value is NaN.",
            confidence=0.7,
        )
    name = seen.bad_gradients[0] if seen.bad_gradients else ""
    return make_finding(
        "nonfinite.other",
        f"The {'gradient of ' + name if name else 'loss'} became NaN or Inf in step {seen.step}.",
        where={"parameter": name},
        confidence=0.5,
    )
