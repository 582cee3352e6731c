"""Faults that show in the course of a run: its updates, its schedule, its order of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...diagnose.finding import Finding
from ...diagnose.run import diagnose_run
from ...observe.history import History
from ...train.spikes import SpikeDetector, spike_event
from ..watching import Watch, watch
from .library import fault
from .parts import TinyModel, adam, batch_of, loss_of, sgd, tiny_llama, train


@fault("loss.frozen")
def rate_is_zero(healthy: bool) -> Watch:
    """A schedule whose rate is 0, over the same batch again and again."""
    model = TinyModel()
    return train(model, sgd(model, 0.1 if healthy else 0.0), steps=12, batches=lambda step: batch_of(0))


@fault("loss.outlier_batch")
def one_huge_gradient(healthy: bool) -> Watch:
    """One batch with a gradient a thousand times as large, and no clipping."""
    model, steps = TinyModel(), [0]

    def compute(batch: Any) -> Tensor:
        steps[0] += 1
        return loss_of(model(**batch)) * (1000.0 if steps[0] == 9 and not healthy else 1.0)

    return train(model, sgd(model), steps=12, compute=compute)


@fault("loss.spikes")
def damaged_rows(healthy: bool) -> list[Finding]:
    """Two damaged rows that come again in every pass through the data."""
    model = TinyModel()
    optimizer, detector, spikes = adam(model, 0.02), SpikeDetector(6.0), []
    for step in range(60):
        batch = batch_of(step % 12, rows=2, vocabulary=8)
        if step % 12 == 5 and step > 24 and not healthy:
            batch["labels"] = batch["labels"] * 0 + 63
        loss = loss_of(model(**batch))
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        spike = detector.judge(float(loss), norm)
        if spike is None:
            optimizer.step()
        else:
            rows = [2 * (step % 12), 2 * (step % 12) + 1]
            spikes.append(spike_event(spike, "skip", step, rows, ()))
        detector.record(float(loss), norm)
    return diagnose_run(History(), spikes=spikes)


@fault("resume.data_order")
def rows_come_again(healthy: bool) -> Watch:
    """A resumed epoch in another order, in which half of the rows come twice."""
    model = TinyModel()
    optimizer = sgd(model)

    def of(steps: range) -> Callable[[int], Any]:
        return lambda step: batch_of(steps[step])

    first = train(model, optimizer, steps=6, batches=of(range(6)))
    again = range(6, 12) if healthy else range(3, 9)
    return train(model, optimizer, steps=6, batches=of(again), continues=first)


@fault("training.accumulation")
def mean_of_means(healthy: bool) -> Watch:
    """Micro-batches of unequal length that count alike."""
    model = tiny_llama()
    optimizer = sgd(model)
    with watch(model, optimizer) as w:
        for step in range(3):
            micros = [batch_of(2 * step, rows=1, length=64), batch_of(2 * step + 1, rows=1, length=64)]
            micros[0]["labels"][:, 4:] = -100
            total = sum(int((micro["labels"][:, 1:] != -100).sum()) for micro in micros)
            for micro in micros:
                if healthy:
                    loss = model(**micro, num_items_in_batch=torch.tensor(total)).loss
                else:
                    loss = model(**micro).loss / len(micros)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            w.step(loss=loss, batch=micros[-1])
    found: Watch = w
    return found


@fault("training.effective_batch")
def batch_was_halved(healthy: bool) -> Watch:
    """A micro-batch that was halved while the accumulation stayed."""
    model = TinyModel()
    optimizer = sgd(model)
    with watch(model, optimizer) as w:
        for step in range(12):
            rows, count = (8, 1) if step < 4 else (4, 2 if healthy else 1)
            for part in range(count):
                batch = batch_of(10 * step + part, rows=rows)
                loss = loss_of(model(**batch)) / count
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            w.step(loss=loss, batch=batch)
    found: Watch = w
    return found


@fault("training.schedule")
def schedule_is_hasty(healthy: bool) -> Watch:
    """A schedule that advances at each micro-step."""
    model = TinyModel()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 100)

    def advance(step: int, loss: Tensor) -> None:
        for _ in range(1 if healthy else 4):
            scheduler.step()

    return train(model, optimizer, steps=10, after=advance, scheduler=scheduler)


@fault("error.other")
def something_else(healthy: bool) -> Watch:
    """An error that is about none of this."""
    model = TinyModel()

    def fail(step: int, loss: Tensor) -> None:
        if step == 2 and not healthy:
            raise KeyError("answer")

    return train(model, sgd(model), steps=4, after=fail)
