"""Audits that run the model on a few rows: does a gradient arrive, and do packed samples see each other?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..failures import explain_failure
from ..finding import Finding, make_finding
from .subject import Subject, register

NUM_ROWS = 2
MAX_TOKENS = 64
MAX_PARAMETERS = 400_000_000  # A forward and backward of more takes longer than an audit should.
LEAK_TOLERANCE = 1e-3


def can_run(subject: Subject) -> bool:
    """Whether the model can be run here in the time that an audit may take."""
    model = subject.model
    if model is None or getattr(model, "config", None) is None or subject.embedding is None:
        return False
    total = 0
    for parameter in model.parameters():
        if parameter.device.type == "meta":
            return False
        total += parameter.numel()
    return total <= MAX_PARAMETERS


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put gradients, random state and mode of a model back as they were."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    state, was_training = torch.get_rng_state(), model.training
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
        torch.set_rng_state(state)
        model.train(was_training)


def small_batch(subject: Subject) -> dict[str, Tensor]:
    """Return two short rows of the data, or of counted ids where there are none."""
    assert subject.embedding is not None
    device, limit = subject.embedding.device, subject.embedding.shape[0]
    ids = subject.collated.get("input_ids")
    if isinstance(ids, Tensor) and ids.ndim == 2:
        ids = ids[:NUM_ROWS, :MAX_TOKENS].clamp(0, limit - 1)
    else:
        ids = torch.arange(16).remainder(limit).repeat(NUM_ROWS, 1)
    ids = ids.to(device)
    return {"input_ids": ids, "labels": ids.clone()}


@register
def gradient_arrives(subject: Subject) -> Finding | None:
    """Each adapter tensor must get a gradient."""
    model = subject.model
    if model is None or not can_run(subject) or subject.packing or subject.saved_folder is not None:
        return None
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        return None
    with undisturbed(model):
        model.train()
        try:
            loss = model(**small_batch(subject)).loss
            loss.backward()
        except RuntimeError as error:
            found = explain_failure(error, model, None, {})
            return found if found.cause.startswith("model.") else None
        except (TypeError, ValueError, AttributeError, IndexError):
            return None
        without = [name for name, p in trainable if p.grad is None]
    # Adapters of a mixture's unused experts and the like: only a large share is a fault.
    adapters = [name for name, _ in trainable if "lora_B" in name]
    if len([name for name in without if "lora_B" in name]) < 0.5 * max(1, len(adapters)):
        return None
    return make_finding(
        "model.adapter_no_gradient",
        f"{len(without)} of {len(trainable)} trainable tensors get no gradient, first {without[0]}: the adapter learns "
        "nothing.",
        where={"parameter": without[0]},
        evidence={"num_without_gradient": len(without)},
        confidence=0.95,
    )


@register
def packed_samples_are_apart(subject: Subject) -> Finding | None:
    """Changing the first sample of a packed row must not move the logits of the second."""
    model = subject.model
    if model is None or not subject.packing or not can_run(subject):
        return None
    # The first row alone: each row has borders of its own.
    batch = {
        name: value[:1] if isinstance(value, Tensor) and value.ndim else value
        for name, value in subject.collated.items()
        if name not in ("labels", "length")
    }
    border = _border(batch, getattr(subject.tokenizer, "eos_token_id", None))
    if border is None:
        return None
    ids = batch["input_ids"]
    other = ids.clone()
    other[:, : border - 1] = (other[:, : border - 1] + 1) % int(getattr(model.config, "vocab_size", 2))
    with undisturbed(model), torch.no_grad():
        try:
            first = model(**batch).logits[:, border:].float()
            second = model(**{**batch, "input_ids": other}).logits[:, border:].float()
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
    moved = float((first - second).abs().max())
    if moved <= LEAK_TOLERANCE * max(1.0, float(first.abs().max())):
        return None
    return make_finding(
        "data.packing_leaks",
        f"The logits of the second sample change by {moved:.3g} when the first one changes: packed "
        f"samples see each other.",
        where={"position": border},
        evidence={"largest_change": moved},
        confidence=1.0,
    )


def _border(batch: Mapping[str, Any], eos: int | None) -> int | None:
    """Return where the second sample of the first row begins."""
    positions, ids = batch.get("position_ids"), batch.get("input_ids")
    if isinstance(positions, Tensor) and positions.ndim == 2:
        starts = torch.nonzero(positions[0] == 0).flatten().tolist()
        return starts[1] if len(starts) > 1 and starts[1] > 1 else None
    if isinstance(ids, Tensor) and eos is not None:
        ends = torch.nonzero(ids[0] == eos).flatten().tolist()
        return ends[0] + 1 if ends and 1 < ends[0] + 1 < ids.shape[1] else None
    return None
