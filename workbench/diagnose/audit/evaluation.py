"""Audits of the evaluation to come: what it keeps, and what a batch of it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...units import format_bytes
from ..finding import Finding, Fix, make_finding
from .subject import Subject, as_list, register

# Logits that outweigh the model this many times are the largest thing in the run.
OUTWEIGHS = 3.0
FLOAT_BYTES = 4
LOSS_COPIES = 4  # Copies of the logits that the training step holds at its peak: logits, float32, softmax, gradient.
EVAL_COPIES = 2


def _shape(subject: Subject) -> tuple[int, int, int] | None:
    """Return rows, longest row and vocabulary of the evaluation."""
    data = subject.eval_dataset
    config = getattr(subject.model, "config", None)
    vocabulary = getattr(config, "vocab_size", 0)
    if data is None or not vocabulary or subject.args is None:
        return None
    longest = 0
    for index in range(min(64, len(data))):
        row = data[index]
        if not isinstance(row, Mapping) or "input_ids" not in row:
            return None
        longest = max(longest, len(as_list(row["input_ids"])))
    return len(data), longest, int(vocabulary)


def _model_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@register
def hidden_states(subject: Subject) -> Finding | None:
    """Everything a model returns is gathered over the whole evaluation."""
    config = getattr(subject.model, "config", None)
    shape = _shape(subject)
    if shape is None or not getattr(config, "output_hidden_states", False) or not subject.compute_metrics:
        return None
    layers, width = getattr(config, "num_hidden_layers", 1) + 1, getattr(config, "hidden_size", 1)
    per_row = layers * shape[1] * width * FLOAT_BYTES
    return make_finding(
        "oom.evaluation_hidden_states",
        f"The evaluation keeps {layers} hidden states per row because the model returns them: "
        f"{format_bytes(per_row)} per "
        f"row, {format_bytes(per_row * shape[0])} in all.",
        where={"object": "model.config.output_hidden_states"},
        evidence={"bytes_per_row": per_row, "num_rows": shape[0]},
        confidence=0.95,
    )


@register
def kept_logits(subject: Subject) -> Finding | None:
    """With metrics and no reduction, the logits of the whole set are kept at once."""
    shape = _shape(subject)
    if shape is None or not subject.compute_metrics or subject.reduces_logits or subject.model is None:
        return None
    if getattr(subject.args, "batch_eval_metrics", False) or getattr(subject.args, "prediction_loss_only", False):
        return None
    rows, length, vocabulary = shape
    num_bytes = rows * length * vocabulary * FLOAT_BYTES
    if num_bytes < OUTWEIGHS * _model_bytes(subject.model):
        return None
    on_host = getattr(subject.args, "eval_accumulation_steps", None) is not None
    text = f"{rows} x {length} x {vocabulary} x 4 B = {format_bytes(num_bytes)}"
    if on_host:
        return make_finding(
            "oom.evaluation_host",
            f"Host memory takes all logits of the evaluation: {text}, and a copy while they are joined.",
            evidence={"kept_bytes": num_bytes},
        )
    return make_finding(
        "oom.evaluation_logits",
        f"The evaluation keeps all logits: {text}, plus a copy while they are joined. Argmax would be "
        f"{format_bytes(rows * length * 8)}.",
        evidence={"kept_bytes": num_bytes},
    )


@register
def batch_of_evaluation(subject: Subject) -> Finding | None:
    """An evaluation batch should not need more than a training batch."""
    shape = _shape(subject)
    if shape is None:
        return None
    train = int(getattr(subject.args, "per_device_train_batch_size", 0))
    evaluation = int(getattr(subject.args, "per_device_eval_batch_size", 0))
    if not train or evaluation < 4 * train or str(getattr(subject.args, "eval_strategy", "no")).endswith("NO"):
        return None
    if str(getattr(subject.args, "eval_strategy", "no")) == "no":
        return None
    _, length, vocabulary = shape
    need = evaluation * length * vocabulary * FLOAT_BYTES * EVAL_COPIES
    training = train * length * vocabulary * FLOAT_BYTES * LOSS_COPIES
    if need <= training:
        return None
    return make_finding(
        "oom.evaluation",
        f"The first evaluation runs {evaluation} rows at once and training {train}: its logits need about "
        f"{format_bytes(need)}, those of training {format_bytes(training)}.",
        evidence={"evaluation_bytes": need, "training_bytes": training},
        fixes=[Fix(f"Set per_device_eval_batch_size={train}.", {"evaluation.per_device_eval_batch_size": train})],
        confidence=0.85,
    )
