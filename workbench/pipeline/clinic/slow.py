"""Faults that cost time and nothing else."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import Tensor

from ..watching import Watch
from .library import fault
from .parts import TinyModel, batch_of, loss_of, padded, sgd, tiny_llama, train


@fault("speed.padding")
def padded_to_the_limit(healthy: bool) -> Watch:
    """Batches that are padded to the maximum length."""
    model = TinyModel()
    return train(
        model, sgd(model), steps=6,
        batches=lambda step: padded([8 + (step + row) % 5 for row in range(4)], width=None if healthy else 64),
    )  # fmt: skip


@fault("speed.gc_every_step")
def collects_every_step(healthy: bool) -> Watch:
    """A full collection in every step."""
    model = TinyModel()
    objects = [[number] for number in range(100_000)]
    w = train(model, sgd(model), steps=8, after=lambda step, loss: None if healthy else _collect())
    objects.clear()
    return w


def _collect() -> None:
    gc.collect()


@fault("speed.empty_cache_every_step")
def empties_every_step(healthy: bool) -> Watch:
    """The device's cache is emptied in every step."""
    model = TinyModel()
    return train(model, sgd(model), steps=8, after=lambda step, loss: None if healthy else torch.cuda.empty_cache())


@fault("speed.checkpointing_in_eval")
def recomputes_in_evaluation(healthy: bool) -> Watch:
    """An evaluation in training mode, in which checkpointing goes on."""
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    model.train()

    def evaluate(step: int, loss: Tensor) -> None:
        model.train(not healthy)
        with torch.no_grad():
            model(**batch_of(100 + step))
        model.train()

    return train(model, sgd(model), steps=3, after=evaluate)


@fault("speed.data_wait")
def rows_are_slow(healthy: bool) -> Watch:
    """Rows that take longer to make than a step."""
    model = TinyModel()

    def batches(step: int) -> dict[str, Tensor]:
        time.sleep(0.0 if healthy else 0.025)
        return batch_of(step)

    return train(model, sgd(model), steps=13, batches=batches)


@fault("speed.recompilation")
def every_length_compiles(healthy: bool) -> Watch:
    """A compiled function of fixed shapes, and batches of ever new length."""
    model: Any = TinyModel()
    compiled = torch.compile(lambda values: values * 2.0, backend="eager", dynamic=False)
    w = train(
        model, sgd(model), steps=9, batches=lambda step: batch_of(step, length=8 if healthy else 8 + step),
        compute=lambda batch: loss_of(model(**batch)) + 0 * compiled(batch["input_ids"].float()).sum(),
    )  # fmt: skip
    torch._dynamo.reset()
    return w
