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
# A difference between prediction and measurement below this share of the measured bytes is not worth a sentence.
NOTABLE = 0.05
# Share of the allocator's memory that lies free in pieces where fragmentation is a reason to run out.
IN_PIECES = 0.15


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
        node: Autograd node that ran, e.g. ``"MmBackward0"``.
        is_first_evaluation: No evaluation of this run has ended before.
        cached_bytes: Reserved by the allocator and in no use, in pieces too small for what was asked.
        other_bytes: What other processes hold of the device.
        predicted_bill: Bytes by category at the predicted peak; empty where nothing was predicted.
        predicted_bytes: Predicted bytes of the process at its peak, 0 where nothing was predicted.
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
    node: str = ""
    is_first_evaluation: bool = False
    cached_bytes: int = 0
    other_bytes: int = 0
    predicted_bill: Mapping[str, int] = field(default_factory=dict)
    predicted_bytes: int = 0
    fixes: Sequence[Fix] = ()

    @property
    def needed_bytes(self) -> int:
        """What the process would have held had the request been granted: the least that it needs."""
        return sum(self.bill.values()) + self.requested_bytes


def judge_oom(seen: OomEvidence) -> Finding:
    """Return the finding of one out-of-memory error."""
    where = {
        "step": seen.step,
        "phase": seen.phase,
        "op": seen.op,
        "node": seen.node,
        "module": seen.module,
        "line": seen.line,
    }
    evidence: dict[str, Any] = {
        "requested_bytes": seen.requested_bytes,
        "limit_bytes": seen.limit_bytes,
        "num_tokens": seen.num_tokens,
        "largest_earlier_tokens": max(seen.earlier_tokens, default=0),
        **{f"{name}_bytes": size for name, size in seen.bill.items()},
    }
    if seen.predicted_bytes:
        evidence |= {"needed_bytes": seen.needed_bytes, "predicted_bytes": seen.predicted_bytes}
        evidence |= {f"predicted_{name}_bytes": size for name, size in seen.predicted_bill.items()}
    facts = new_facts(seen)
    if facts:
        evidence["new_facts"] = tuple(facts)
    cause, summary, confidence = _explain(seen)
    asked = f" {format_bytes(seen.requested_bytes)} more were asked for by {seen.op}" if seen.requested_bytes else ""
    inside = f" in {seen.module}" if seen.module and asked else ""
    sentences = [f"{summary}{asked}{inside}." if asked else summary, *_compare(seen)]
    return make_finding(
        cause,
        " ".join(sentences),
        where=where,
        evidence=evidence,
        fixes=[*seen.fixes, Fix(default_remedy(cause))],
        confidence=confidence,
    )


def new_facts(seen: OomEvidence) -> list[str]:
    """Return what happened here for the first time, and what is not of this run: each may be the reason."""
    facts = []
    most = max(seen.earlier_tokens, default=0)
    if seen.phase == "evaluation":
        if seen.is_first_evaluation:
            facts.append("first evaluation of the run")
    elif most and seen.num_tokens > most:
        facts.append(f"longest micro-batch so far: {seen.num_tokens} token slots, before at most {most}")
    if seen.phase == "optimizer" and seen.state_is_new and seen.step == 0:
        facts.append("first optimizer step: its state is being made")
    elif seen.state_is_new and seen.step > 0 and seen.bill.get("optimizer_state", 0) > 0:
        facts.append("first step with optimizer state")
    elif seen.step == 0 and seen.phase in ("forward", "loss", "backward"):
        facts.append("first step of the run")
    if seen.requested_bytes and seen.cached_bytes >= seen.requested_bytes:
        facts.append(f"{format_bytes(seen.cached_bytes)} are reserved and free, in pieces too small")
    if seen.other_bytes > 0.02 * seen.limit_bytes > 0:
        facts.append(f"another process holds {format_bytes(seen.other_bytes)} of the device")
    return facts


def _compare(seen: OomEvidence) -> list[str]:
    """Return one sentence about the prediction, where there was one."""
    if not seen.predicted_bytes or not seen.limit_bytes:
        return []
    predicted, limit = format_bytes(seen.predicted_bytes), format_bytes(seen.limit_bytes)
    if seen.predicted_bytes > seen.limit_bytes:
        return [f"Predicted was a peak of {predicted}, more than the {limit} of the device."]
    missed = seen.needed_bytes - seen.predicted_bytes
    if missed <= NOTABLE * seen.needed_bytes:
        return [f"Predicted was a peak of {predicted} of {limit}."]
    apart = {
        name: size - seen.predicted_bill.get(name, 0)
        for name, size in seen.bill.items()
        if size > seen.predicted_bill.get(name, 0)
    }
    most = max(apart, key=lambda name: apart[name], default="")
    where = f", most of it {most.replace('_', ' ')} ({format_bytes(apart[most])} more)" if most else ""
    return [f"Predicted was a peak of {predicted}: {format_bytes(missed)} less than was needed{where}."]


def default_remedy(cause: str) -> str:
    """Return what the table of causes advises."""
    from .causes import CAUSES

    return CAUSES[cause].remedy


def _explain(seen: OomEvidence) -> tuple[str, str, float]:
    names = set(seen.functions)
    if seen.phase == "resume" and "load_state_dict" not in names:
        size = format_bytes(seen.bill.get("parameter", 0))
        return (
            "oom.optimizer_state",
            f"Ran out while resuming: beside the weights ({size}) there is no room for the optimizer state that the "
            "checkpoint holds. Was it made on a larger device?",
            0.85,
        )
    if "load_state_dict" in names:
        size = format_bytes(seen.state_bytes)
        return (
            "oom.resume_two_copies",
            f"Ran out while loading the checkpoint: two copies of the optimizer state ({size} each) exist at once.",
            0.9,
        )
    if seen.phase == "load":
        weights = seen.bill.get("parameter", 0)
        place = f", with {format_bytes(weights)} of weights in place" if weights else ""
        return "oom.weights", f"Ran out while loading the model{place}.", 0.9
    if names & {"save_pretrained", "save_model", "state_dict"} or seen.phase == "save":
        return "oom.save", "Ran out while saving: the state dict needs a second copy on the device.", 0.9
    if seen.phase == "evaluation":
        return (
            "oom.evaluation",
            f"Ran out in evaluation after step {seen.step} with {seen.num_rows} rows of {seen.num_tokens} token "
            "slots; training was not short.",
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
    return _by_free_memory(seen) or _by_bill(seen)


def _by_free_memory(seen: OomEvidence) -> tuple[str, str, float] | None:
    """Return the verdict where the run would have had room: memory of others, or free memory in pieces."""
    if not seen.requested_bytes:
        return None
    if seen.other_bytes > 0.02 * seen.limit_bytes and seen.other_bytes >= seen.requested_bytes:
        return (
            "oom.other_process",
            f"Another process holds {format_bytes(seen.other_bytes)} of the {format_bytes(seen.limit_bytes)}; without "
            f"it this allocation in {seen.phase} of step {seen.step} would have had room.",
            0.8,
        )
    # Some is always in pieces: only where it is much, and the settings were to fit, is that the reason.
    in_pieces = seen.cached_bytes > IN_PIECES * (seen.limit_bytes - seen.bill.get("context", 0))
    if in_pieces and seen.cached_bytes >= seen.requested_bytes and seen.predicted_bytes <= seen.limit_bytes:
        return (
            "oom.fragmentation",
            f"{format_bytes(seen.cached_bytes)} are reserved and free in {seen.phase} of step {seen.step}, but in "
            "pieces too small.",
            0.8,
        )
    return None


def _by_bill(seen: OomEvidence) -> tuple[str, str, float]:
    own = {name: size for name, size in seen.bill.items() if name not in ("context", "cached", "workspace")}
    total = sum(own.values()) + seen.requested_bytes
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
