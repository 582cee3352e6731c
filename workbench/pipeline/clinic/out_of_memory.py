"""Faults that fill the memory: a device that is full at a few hundred KiB is played, so that each takes an instant."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ...diagnose.finding import Finding
from ...diagnose.oom import OomEvidence, judge_oom
from ...units import KIB, MIB
from ..checking import check
from ..watching import Watch, watch
from .library import fault
from .parts import TinyModel, adam, batch_of, padded, sgd, tiny_llama, token_rows, train

WIDTH = 256  # A square layer of this width takes 256 KiB.


def _layers(count: int, *, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def _mean_of(model: nn.Module, rows: int = 2) -> Callable[[Any], Tensor]:
    def compute(batch: Any) -> Tensor:
        mean: Tensor = model(batch).mean()
        return mean

    return compute


def _inputs(step: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, WIDTH)


@fault("oom.optimizer_state")
def state_is_made(healthy: bool) -> Watch:
    """Room for weights and gradients, none for Adam's moments."""
    model = _layers(4)
    optimizer = sgd(model) if healthy else adam(model)
    return train(model, optimizer, steps=3, batches=_inputs, compute=_mean_of(model), limit=3 * MIB)


@fault("oom.weights")
def weights_are_too_large(healthy: bool) -> Watch:
    """A frozen base that takes nearly all of the memory."""
    base, head = _layers(1 if healthy else 8).requires_grad_(False), nn.Linear(WIDTH, 4)
    model = nn.Sequential(base, head)
    return train(model, sgd(model), steps=3, batches=lambda step: torch.randn(64, WIDTH), compute=_mean_of(model),
                 limit=2 * MIB + 120 * KIB)  # fmt: skip


@fault("oom.other")
def gradients_are_the_last_straw(healthy: bool) -> Watch:
    """Weights and gradients that fill the memory between them."""
    model = _layers(8)
    return train(model, sgd(model), steps=2, batches=_inputs, compute=_mean_of(model),
                 limit=6 * MIB if healthy else 3 * MIB + 800 * KIB)  # fmt: skip


@fault("oom.activations")
def many_activations(healthy: bool) -> Watch:
    """Rows whose activations fill the memory."""
    model = _layers(4)
    return train(model, sgd(model), steps=2, batches=lambda step: _inputs(step, 2 if healthy else 2048),
                 compute=_mean_of(model), limit=5 * MIB)  # fmt: skip


@fault("oom.loss_logits")
def logits_of_a_large_vocabulary(healthy: bool) -> Watch:
    """Copies of the logits, which outgrow everything else."""
    model = TinyModel(vocabulary=2048, hidden=8)
    return train(
        model, sgd(model), steps=2, batches=lambda step: batch_of(step, rows=1 if healthy else 8, vocabulary=2048),
        limit=1200 * KIB,
    )  # fmt: skip


@fault("oom.longest_batch")
def one_long_row(healthy: bool) -> Watch:
    """One batch with a row eight times as long as any before."""
    model = TinyModel()
    return train(
        model, sgd(model), steps=9,
        batches=lambda step: padded([16, 14, 15, 200 if step == 7 and not healthy else 16]), limit=300 * KIB,
    )  # fmt: skip


@fault("oom.grouped_long_rows")
def long_rows_together(healthy: bool) -> Watch:
    """The long rows of the data in one batch, as grouping by length puts them."""
    model = TinyModel()
    return train(
        model, sgd(model), steps=9,
        batches=lambda step: padded([160, 170, 165, 168] if step == 7 and not healthy else [12] * 4), limit=300 * KIB,
    )  # fmt: skip


@fault("oom.row_not_truncated")
def row_is_too_long(healthy: bool) -> Watch:
    """A row that nobody cut to the maximum."""
    model = TinyModel()
    return train(
        model, sgd(model), steps=5, batches=lambda step: padded([20, 400 if step == 3 and not healthy else 20]),
        limit=300 * KIB, max_length=64,
    )  # fmt: skip


@fault("oom.evaluation")
def evaluation_is_larger(healthy: bool) -> Watch:
    """An evaluation batch sixteen times as large as a training batch."""
    model = TinyModel()

    def evaluate(step: int, loss: Tensor) -> None:
        with torch.no_grad():
            model(**batch_of(1, rows=4 if healthy else 256))

    return train(model, sgd(model), steps=2, after=evaluate, limit=300 * KIB)


def _evaluating(*, states: bool = False, **arguments: Any) -> list[Finding]:
    model = tiny_llama(vocabulary=2048)
    model.config.output_hidden_states = states
    reduces = bool(arguments.pop("reduces", False))
    args = SimpleNamespace(per_device_train_batch_size=4, per_device_eval_batch_size=4, eval_strategy="epoch",
                           eval_accumulation_steps=None, batch_eval_metrics=False)  # fmt: skip
    vars(args).update(arguments)
    return check({"model": model, "args": args, "eval_dataset": token_rows(64, length=32), "compute_metrics": True,
                  "reduces_logits": reduces})  # fmt: skip


@fault("oom.evaluation_logits")
def all_logits_are_kept(healthy: bool) -> list[Finding]:
    """Metrics over the logits of the whole evaluation set."""
    return _evaluating(reduces=healthy)


@fault("oom.evaluation_host")
def all_logits_on_the_host(healthy: bool) -> list[Finding]:
    """The same, moved to host memory step by step."""
    return _evaluating(eval_accumulation_steps=1, batch_eval_metrics=healthy)


@fault("oom.evaluation_hidden_states")
def hidden_states_are_kept(healthy: bool) -> list[Finding]:
    """A model that returns its hidden states, which the evaluation gathers."""
    return _evaluating(states=not healthy, reduces=True)


def _copy(value: Any) -> Any:
    """Stand for ``.to("cuda")``: a second copy on the device."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


@fault("oom.resume_two_copies")
def state_is_loaded_twice(healthy: bool) -> Watch:
    """The saved moments, loaded onto the device next to those that are there."""
    model = _layers(4)
    optimizer = adam(model)
    model(_inputs(0)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = optimizer.state_dict()
    w: Watch = watch(model, optimizer, limit=20 * MIB if healthy else 4 * MIB)
    with contextlib.suppress(torch.OutOfMemoryError), w:
        optimizer.load_state_dict(_copy(saved))
        w.step()
    return w


@fault("oom.save")
def state_is_gathered_to_save(healthy: bool) -> Watch:
    """A state dict that is gathered on the device before it is written."""
    model = _layers(4)

    def save_model() -> dict[str, Tensor]:
        return {name: value if healthy else value.clone() for name, value in model.state_dict().items()}

    w: Watch = watch(model, sgd(model), limit=MIB + 600 * KIB)
    with contextlib.suppress(torch.OutOfMemoryError), w:
        w.step()
        save_model()
    return w


@fault("oom.fragmentation")
def free_memory_in_pieces(healthy: bool) -> list[Finding]:
    """Results on an emulated card that are cut from larger blocks: what is left beside each fits nothing."""
    from ...hardware import find_device
    from ...observe.emulated import EmulatedDevice

    whole = find_device("Tesla T4")
    device = dataclasses.replace(whole, capacity_bytes=whole.context_bytes + 160 * MIB)
    held: list[Tensor] = []
    with EmulatedDevice(device) as card:
        try:
            for step in range(6):
                work = torch.empty((38 if step < 4 else 30) * MIB, dtype=torch.uint8)
                del work
                held.append(torch.empty(20 * MIB, dtype=torch.uint8))
                held = held[:0] if healthy else held
        except torch.OutOfMemoryError:
            failed = card.failure
        else:
            return []
    assert failed is not None
    stats = failed.stats
    return [judge_oom(OomEvidence(
        step=step, phase="forward", op=failed.operator, requested_bytes=failed.num_bytes,
        limit_bytes=device.capacity_bytes, cached_bytes=stats.reserved - stats.allocated,
        bill={"activation": stats.allocated, "context": device.context_bytes},
    ))]  # fmt: skip
