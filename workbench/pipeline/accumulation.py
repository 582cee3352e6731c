"""Whether accumulated micro-batches add up to the large batch: compared in gradients, since losses hide it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..diagnose.finding import Finding, make_finding
from .loop_hooks import MicroBatch, StepFacts

if TYPE_CHECKING:
    from .watching import Watch

UNEQUAL = 1.5  # Micro-batches whose supervised tokens differ less than this hide nothing worth a look.
MIN_COSINE = 0.995
MAX_LOOKS = 2


def supervised(micro: MicroBatch) -> int:
    """Return the supervised tokens of one micro-batch; 0 when it has no labels."""
    labels = micro.kwargs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim < 2:
        return 0
    return int((labels[..., 1:] != -100).sum())


def compare_gradients(watch: Watch, facts: StepFacts) -> Finding | None:
    """Return a finding when the step's gradient points away from that of the mean over all its tokens.

    Called before the update, since the gradients of other weights are other gradients. Runs each micro-batch once
    more, at most twice a run, and only when their token counts differ.
    """
    looks = watch.accumulation_looks
    micros = [micro for micro in facts.micro_batches if micro.had_grad and micro.loss is not None]
    if looks >= MAX_LOOKS or len(micros) < 2 or watch.model is None or facts.num_updates != 1:
        return None
    if any("num_items_in_batch" in micro.kwargs for micro in micros):
        return None
    counts = [supervised(micro) for micro in micros]
    if min(counts) <= 0 or max(counts) < UNEQUAL * min(counts):
        return None
    watch.accumulation_looks = looks + 1
    own = flat_gradient(watch)
    gradients = [_gradient(watch, micro) for micro in micros]
    right = sum((g * n for g, n in zip(gradients, counts, strict=True)), torch.zeros_like(gradients[0])) / sum(counts)
    plain = torch.stack(gradients).mean(0)
    to_right, to_plain = _cosine(own, right), _cosine(own, plain)
    # Only a gradient that is the mean of means shows this fault; two forwards of one loss are something else.
    if to_right >= MIN_COSINE or to_plain < MIN_COSINE:
        return None
    low, high = min(counts), max(counts)
    return make_finding(
        "training.accumulation",
        f"Accumulation weights a micro-batch of {low} tokens like one of {high}: the cosine of its "
        f"gradient to the right "
        f"one is {to_right:.2f}.",
        where={"step": watch.num_steps + 1},
        evidence={
            "gradient_cosine": to_right,
            "cosine_to_mean_of_means": to_plain,
            "supervised_tokens": tuple(counts),
            "norm_ratio": float(own.norm() / right.norm()),
        },
        confidence=0.95,
    )


def _gradient(watch: Watch, micro: MicroBatch) -> Tensor:
    from .replay import quiet

    assert watch.model is not None
    with torch.enable_grad(), quiet(watch.hooks, micro):
        loss = watch.model(*micro.args, **micro.kwargs).loss
        loss.backward()
        return flat_gradient(watch)


def flat_gradient(watch: Watch) -> Tensor:
    """Return the gradients of the trained parameters as one float32 vector, a sample where there are many."""
    parts = []
    budget = 2_000_000
    for parameter in itertools.islice(watch.hooks.trained(), 4096):
        if budget <= 0:
            break
        gradient = parameter.grad
        flat = torch.zeros(parameter.numel()) if gradient is None else gradient.detach().reshape(-1).float().cpu()
        parts.append(flat[:budget].clone())
        budget -= flat.numel()
    return torch.cat(parts) if parts else torch.zeros(1)


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))
