"""Audits that compare two ways to the same values: with and without checkpointing, split and whole, saved and read."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..finding import Finding, make_finding
from .gradients import can_run, small_batch, undisturbed
from .subject import Subject, register

# Recomputed kernels are the same kernels: what differs by more than rounding is another function.
CHECKPOINTING_COSINE = 0.9999
ACCUMULATION_COSINE = 0.995
MAX_ELEMENTS = 4_000_000  # Gradients that are compared at most.


@register
def checkpointing_is_transparent(subject: Subject) -> Finding | None:
    """Gradients with checkpointing must be those without."""
    model = subject.model
    if model is None or not can_run(subject) or subject.saved_folder is not None:
        return None
    if subject.packing or not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return None
    batch = small_batch(subject)
    with undisturbed(model):
        model.train()
        state = torch.get_rng_state()
        try:
            with_it = _gradient(model, lambda: model(**batch).loss)
            torch.set_rng_state(state)
            with _without_checkpointing(model):
                without = _gradient(model, lambda: model(**batch).loss)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return None
    # Of another size: some parameter gets no gradient at all, which the audit of gradients names.
    if len(with_it) != len(without) or not len(without) or float(without.norm()) == 0:
        return None
    cosine = _cosine(with_it, without)
    if cosine >= CHECKPOINTING_COSINE and abs(float(with_it.norm() / without.norm()) - 1) < 1e-3:
        return None
    return make_finding(
        "training.checkpointing_differs",
        f"With gradient checkpointing the gradient is another one: cosine {cosine:.3f}, norm "
        f"{float(with_it.norm()):.3g} instead of {float(without.norm()):.3g}.",
        where={"object": "gradient_checkpointing"},
        evidence={"gradient_cosine": cosine, "norm_ratio": float(with_it.norm() / without.norm())},
        confidence=0.95,
    )


@register
def accumulation_adds_up(subject: Subject) -> Finding | None:
    """Micro-batches of unequal length must add up to the gradient of the batch as a whole."""
    model, loss = subject.model, subject.loss
    if model is None or loss is None or subject.accumulation < 2 or not can_run(subject):
        return None
    found = _unequal_halves(subject)
    if found is None:
        return None
    whole, halves, counts = found
    with undisturbed(model):
        model.eval()  # Dropout would draw otherwise in the halves; the gradients are those of training all the same.
        try:
            right = _gradient(model, lambda: loss(whole, sum(counts)))
            model.zero_grad(set_to_none=True)
            split = _gradient(model, *(lambda half=half: loss(half, sum(counts)) for half in halves))
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
            return None
    if not len(right) or float(right.norm()) == 0:
        return None
    cosine = _cosine(split, right)
    if cosine >= ACCUMULATION_COSINE:
        return None
    return make_finding(
        "training.accumulation",
        f"Accumulation weights a micro-batch of {min(counts)} tokens like one of {max(counts)}: the cosine of its "
        f"gradient to that of the whole batch is {cosine:.2f}.",
        where={"object": "gradient_accumulation_steps"},
        evidence={"gradient_cosine": cosine, "supervised_tokens": counts},
        confidence=0.95,
    )


@register
def adapter_reads_back(subject: Subject) -> Finding | None:
    """What is written of an adapter must read back into it with equal values; what is at a folder must be equal."""
    model: Any = subject.model
    if model is None or not isinstance(getattr(model, "peft_config", None), dict):
        return None
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        return None
    if subject.saved_folder is not None:
        return _differs(model, Path(subject.saved_folder))
    if not can_run(subject):
        return None
    with tempfile.TemporaryDirectory(prefix="workbench-check-") as folder:
        try:
            model.save_pretrained(folder, save_embedding_layers=False)
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            return make_finding(
                "save.read_back",
                f"The adapter cannot be saved: {type(error).__name__}: {error}",
                evidence={"num_wrong": 0},
            )
        return _differs(model, Path(folder))


def _differs(model: Any, folder: Path) -> Finding | None:
    """Return a finding where the file lacks trained tensors or holds other values."""
    from peft import get_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / "adapter_model.safetensors"
    if not path.exists():
        return None
    try:
        written = load_file(path)
    except (OSError, SafetensorError) as error:
        return make_finding("save.read_back", f"{path.name} cannot be read: {error}", where={"path": str(path)})
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    if len(written) < len(expected):
        return None  # Told by the audit of what was saved.
    wrong = [
        name
        for name, value in expected.items()
        if name not in written or not torch.equal(written[name], value.detach().cpu().to(written[name].dtype))
    ]
    if not wrong:
        return None
    return make_finding(
        "save.read_back",
        f"{len(wrong)} of {len(expected)} adapter tensors read back with other values than the model has, first "
        f"{wrong[0]}.",
        where={"path": str(path), "parameter": wrong[0]},
        evidence={"num_wrong": len(wrong), "num_expected": len(expected)},
        confidence=1.0,
    )


@register
def one_scaler(subject: Subject) -> Finding | None:
    """A loss must be scaled once: by the trainer, or by the loop's own scaler."""
    is_on = getattr(subject.scaler, "is_enabled", None)
    if is_on is None or not is_on() or not getattr(subject.args, "fp16", False):
        return None
    return make_finding(
        "training.double_scaler",
        "The trainer scales the loss (fp16=True) and so does a gradient scaler of the loop's own: gradients are scaled "
        "twice, unscaled once.",
        where={"object": type(subject.scaler).__name__},
        evidence={"scale": float(subject.scaler.get_scale())},
        confidence=0.95,
    )


def _gradient(model: nn.Module, *losses: Callable[[], Tensor]) -> Tensor:
    """Return the gradient that some backward passes add up to, as one vector (a part of it where there is much)."""
    for loss in losses:
        loss().backward()
    parts, room = [], MAX_ELEMENTS
    for parameter in model.parameters():
        if parameter.grad is not None and room > 0:
            parts.append(parameter.grad.detach().flatten()[:room].float().cpu().clone())
            room -= parameter.grad.numel()
    model.zero_grad(set_to_none=True)
    return torch.cat(parts) if parts else torch.zeros(0)


@contextlib.contextmanager
def _without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Turn checkpointing off at every module that has a switch, and on again."""
    modules: list[Any] = list(model.modules())
    switched = [module for module in modules if getattr(module, "gradient_checkpointing", False) is True]
    for module in switched:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True


def _unequal_halves(subject: Subject) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], tuple[int, int]] | None:
    """Return a batch, its two halves, and the tokens that each of them learns: the rows with most and with least."""
    batch = {name: value for name, value in subject.collated.items() if isinstance(value, Tensor) and value.ndim == 2}
    labels = batch.get("labels")
    if labels is None or len(labels) < 2:
        return None
    counts = (labels[:, 1:] != -100).sum(1)
    order = [int(row) for row in counts.argsort() if int(counts[row]) > 0]
    if len(order) < 2 or int(counts[order[-1]]) < 1.5 * int(counts[order[0]]):
        return None
    device = subject.embedding.device if subject.embedding is not None else labels.device
    rows = [order[0], order[-1]]
    whole = {name: value[rows].to(device) for name, value in batch.items()}
    halves = [{name: value[place : place + 1] for name, value in whole.items()} for place in range(2)]
    return whole, halves, (int(counts[rows[0]]), int(counts[rows[1]]))


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))
