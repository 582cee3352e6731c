"""Verdict on an out-of-memory error: phase, operator, the bill at that instant, and the fact that explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..units import format_bytes
from .finding import Finding, Fix, make_finding

LOSS_OPS = ("log_softmax", "softmax", "nll_loss", "cross_entropy", "_to_copy", "logsumexp")
# What makes the failing batch longer than any before: less is not an explanation.
LONGER = 1.15


@dataclass
class OomEvidence:
    """What is known at the instant of the failure.

    Attributes:
        step: Step in which it happened; 0 for the first.
        phase: ``"load"``, ``"forward"``, ``"loss"``, ``"backward"``, ``"optimizer"``, ``"evaluation"``,
            ``"save"`` or ``"resume"``.
        op: Operator, or ``""``.
        module: Innermost module.
        line: ``file:line`` of the user's code.
        requested_bytes: What was asked for; 0 where not known.
        limit_bytes: What the device or limit has; 0 where not known.
        bill: Bytes by category at that instant.
        logits_bytes: Bytes of live tensors whose last dimension is the vocabulary.
        logits_shape: Of the largest of them.
        num_tokens: Token slots of the batch.
        num_rows: Rows of the batch.
        row_tokens: Real tokens of each row, where known.
        earlier_tokens: Token slots of each earlier step.
        max_length: Length that rows should not exceed, or None.
        state_is_new: The optimizer made its state in this step or in the one before.
        state_bytes: Bytes of that state: present, or expected.
        optimizer_name: Class name.
        functions: Names of the functions in the traceback.
        fixes: Settings that fit, ranked, from the estimator where there is one.
    """

    step: int
    phase: str
    op: str = ""
    module: str = ""
    line: str = ""
    requested_bytes: int = 0
    limit_bytes: int = 0
    bill: Mapping[str, int] = field(default_factory=dict)
    logits_bytes: int = 0
    logits_shape: tuple[int, ...] = ()
    num_tokens: int = 0
    num_rows: int = 0
    row_tokens: Sequence[int] = ()
    earlier_tokens: Sequence[int] = ()
    earlier_row_tokens: Sequence[int] = ()
    max_length: int | None = None
    state_is_new: bool = False
    state_bytes: int = 0
    optimizer_name: str = "optimizer"
    functions: Sequence[str] = ()
    fixes: Sequence[Fix] = ()


def judge_oom(seen: OomEvidence) -> Finding:
    """Return the finding of one out-of-memory error."""
    where = {"step": seen.step, "phase": seen.phase, "op": seen.op, "module": seen.module, "line": seen.line}
    evidence: dict[str, Any] = {
        "requested_bytes": seen.requested_bytes,
        "limit_bytes": seen.limit_bytes,
        "num_tokens": seen.num_tokens,
        "largest_earlier_tokens": max(seen.earlier_tokens, default=0),
        **{f"{name}_bytes": size for name, size in seen.bill.items()},
    }
    cause, summary, confidence = _explain(seen)
    asked = f" {format_bytes(seen.requested_bytes)} more were asked for by {seen.op}" if seen.requested_bytes else ""
    inside = f" in {seen.module}" if seen.module and asked else ""
    return make_finding(
        cause,
        f"{summary}{asked}{inside}." if asked else summary,
        where=where,
        evidence=evidence,
        fixes=[*seen.fixes, Fix(default_remedy(cause))],
        confidence=confidence,
    )


def default_remedy(cause: str) -> str:
    """Return what the table of causes advises."""
    from .causes import CAUSES

    return CAUSES[cause].remedy


def _explain(seen: OomEvidence) -> tuple[str, str, float]:
    names = set(seen.functions)
    if "load_state_dict" in names or seen.phase == "resume":
        size = format_bytes(seen.state_bytes)
        return (
            "oom.resume_two_copies",
            f"Ran out while loading the checkpoint: two copies of the optimizer state ({size} each) exist at once.",
            0.9,
        )
    if names & {"save_pretrained", "save_model", "state_dict"} or seen.phase == "save":
        return "oom.save", "Ran out while saving: the state dict needs a second copy on the device.", 0.9
    if seen.phase == "evaluation":
        return (
            "oom.evaluation",
            f"Ran out in evaluation with {seen.num_rows} rows of {seen.num_tokens} token slots; "
            f"training was not short.",
            0.85,
        )
    if seen.phase == "optimizer":
        return (
            "oom.optimizer_state",
            f"Ran out inside optimizer.step of step {seen.step}: {seen.optimizer_name} is making its state "
            f"({format_bytes(seen.state_bytes)}).",
            0.95,
        )
    most = max(seen.earlier_tokens, default=0)
    longest = max(seen.row_tokens, default=0)
    if seen.max_length and longest > seen.max_length:
        row = list(seen.row_tokens).index(longest)
        return (
            "oom.row_not_truncated",
            f"Batch row {row} has {longest} tokens although the maximum is {seen.max_length}: it was not truncated.",
            0.95,
        )
    if seen.step > 0 and most and seen.num_tokens > LONGER * most:
        typical = sorted(seen.earlier_row_tokens)[len(seen.earlier_row_tokens) // 2] if seen.earlier_row_tokens else 0
        if len(seen.row_tokens) > 1 and typical and min(seen.row_tokens) > 2 * typical:
            return (
                "oom.grouped_long_rows",
                f"The longest rows came together: {seen.num_tokens} tokens in one batch, its shortest row "
                f"{min(seen.row_tokens)}, while a typical row has {typical}. Grouping by length does that.",
                0.85,
            )
        return (
            "oom.longest_batch",
            f"Not a leak: step {seen.step} has {seen.num_tokens} token slots, no earlier one had more than {most}.",
            0.9,
        )
    if seen.state_is_new and seen.step > 0 and seen.bill.get("optimizer_state", 0) > 0:
        size = format_bytes(seen.bill["optimizer_state"])
        return (
            "oom.optimizer_state",
            f"Ran out in step {seen.step}, the first after {seen.optimizer_name} made its state ({size}); "
            "the same batch fitted before.",
            0.9,
        )
    return _by_bill(seen)


def _by_bill(seen: OomEvidence) -> tuple[str, str, float]:
    total = sum(seen.bill.values()) + seen.requested_bytes
    weights = seen.bill.get("parameter", 0)
    moving = max(1, total - weights - seen.bill.get("optimizer_state", 0) - seen.bill.get("gradient", 0))
    logits = seen.logits_bytes + (seen.requested_bytes if any(op in seen.op for op in LOSS_OPS) else 0)
    if logits > 0.5 * moving:
        shape = "x".join(map(str, seen.logits_shape))
        return (
            "oom.loss_logits",
            f"The peak is in the loss, not the layers: logits {shape} and their copies are {format_bytes(logits)} of "
            f"{format_bytes(moving)} that are not weights or state.",
            0.9,
        )
    if total and weights > 0.7 * total:
        return "oom.weights", f"The weights alone take {format_bytes(weights)}.", 0.8
    if total and moving > 0.4 * total:
        return (
            "oom.activations",
            f"At {seen.num_rows} rows and {seen.num_tokens} tokens, activations are "
            f"{100 * moving / total:.0f} % of the "
            f"memory in use; gradients and optimizer state only "
            f"{100 * (seen.bill.get('gradient', 0) + seen.bill.get('optimizer_state', 0)) / total:.0f} %.",
            0.85,
        )
    return "oom.other", f"Memory ran out in {seen.phase} of step {seen.step}.", 0.5
