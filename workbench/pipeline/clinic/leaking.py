"""Faults that let memory grow, and what only looks like one."""

from __future__ import annotations

import gc
import itertools
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from ...diagnose.finding import Finding, make_finding
from ...diagnose.leaks import judge_leak
from ...units import MIB
from ..checking import check
from ..watching import Watch, watch
from .library import fault
from .parts import TinyModel, adam, batch_of, loss_of, train


@fault("leak.graph_total")
def running_total(healthy: bool) -> Watch:
    """A total of losses with their history."""
    model, total = TinyModel(), torch.zeros(())

    def add(step: int, loss: Tensor) -> None:
        nonlocal total
        total = total + (loss.detach() if healthy else loss)

    return train(model, adam(model), after=add, look="now")


@fault("leak.graph_kept")
def losses_kept(healthy: bool) -> Watch:
    """A list of losses with their graphs."""
    model = TinyModel()
    history: list[Any] = []
    return train(
        model, adam(model), after=lambda step, loss: history.append(loss.item() if healthy else loss), look="now"
    )


@fault("leak.carried_state")
def recurrent_state(healthy: bool) -> Watch:
    """A recurrent state that is not detached between steps."""
    cell, state = nn.GRU(8, 8), None
    with watch(cell, look="now") as w:
        for _ in range(18):
            outputs, state = cell(torch.randn(3, 2, 8), state)
            if healthy:
                state = state.detach()
            w.step(loss=outputs.mean().detach())
    found: Watch = w
    return found


@fault("leak.create_graph")
def graph_of_gradients(healthy: bool) -> Watch:
    """Gradients made with create_graph that stay in ``.grad``."""
    model = TinyModel()
    optimizer = adam(model)
    with watch(model, optimizer, look="now") as w:
        for step in range(18):
            batch = batch_of(step)
            loss = loss_of(model(**batch))
            loss.backward(create_graph=True)
            optimizer.step()
            if healthy:
                optimizer.zero_grad(set_to_none=True)
            w.step(loss=loss, batch=batch)
    found: Watch = w
    return found


@fault("leak.hook_buffer")
def hook_collects(healthy: bool) -> Watch:
    """A forward hook that collects activations."""
    model = TinyModel()
    model.up.__dict__["activations"] = []

    def keep(module: Any, args: Any, output: Tensor) -> None:
        if healthy:
            module.activations.clear()
        module.activations.append(output.detach())

    model.up.register_forward_hook(keep)
    return train(model, adam(model), look="now")


@fault("leak.backward_hook")
def backward_hook_keeps(healthy: bool) -> list[Finding]:
    """A backward hook that keeps the gradients of activations."""
    model = TinyModel()

    def keep(module: Any, grad_input: Any, grad_output: Any) -> None:
        module.last_gradient = None if healthy else grad_output

    model.up.register_full_backward_hook(keep)
    loss_of(model(**batch_of(0))).backward()
    return check({"model": model})


@fault("leak.module_attribute")
def attribute_holds(healthy: bool) -> list[Finding]:
    """A module attribute that still holds activations."""
    model = TinyModel()

    def keep(module: Any, args: Any, output: Tensor) -> None:
        module.last_output = output.shape if healthy else output

    model.up.register_forward_hook(keep)
    model(**batch_of(0))
    return check({"model": model})


@fault("leak.cache_carried")
def cache_carried(healthy: bool) -> Watch:
    """A cache that is passed on and grows."""
    model = TinyModel()
    past = torch.zeros(1, 16)

    def extend(step: int, loss: Tensor) -> None:
        nonlocal past
        new = model.embed(batch_of(step)["input_ids"][0]).detach()
        past = new if healthy else torch.cat([past, new])

    return train(model, adam(model), after=extend, look="now")


@fault("leak.kept_tensors")
def outputs_kept(healthy: bool) -> Watch:
    """A list of logits."""
    model = TinyModel()
    outputs: list[Any] = []

    def compute(batch: Any) -> Tensor:
        output = model(**batch)
        outputs.append(output["logits"].detach().argmax().item() if healthy else output["logits"].detach())
        return loss_of(output)

    return train(model, adam(model), compute=compute, look="now")


@fault("leak.per_phase")
def metric_not_reset(healthy: bool) -> Watch:
    """A metric that is not reset after an evaluation."""
    model = TinyModel()
    scores: list[Tensor] = []

    def evaluate(step: int, loss: Tensor) -> None:
        if step % 4 == 3:
            if healthy:
                scores.clear()
            with torch.no_grad():
                scores.append(model(**batch_of(1000 + step))["logits"])

    return train(model, adam(model), steps=44, after=evaluate, look="now")


@fault("leak.parameters_added")
def model_grows(healthy: bool) -> Watch:
    """Layers that are added while training."""
    model = TinyModel()
    extra = model.extra = nn.ModuleList()

    def grow(step: int, loss: Tensor) -> None:
        if step % 4 == 0:
            if healthy:
                extra.pop(-1) if len(extra) else None
            extra.append(nn.Linear(16, 16))

    return train(model, adam(model), after=grow, look="now")


@fault("leak.worker_memory")
def rows_as_objects(healthy: bool) -> list[Finding]:
    """Loader workers over a long list of Python objects."""
    texts: Any = torch.arange(60_000) if healthy else [str(number) for number in range(60_000)]
    return check({"dataloader": torch.utils.data.DataLoader(texts, num_workers=2)})


@fault("leak.steady_growth")
def held_by_an_iterator(healthy: bool) -> Watch:
    """Tensors that only the inside of an iterator holds, where no name leads."""
    model = TinyModel()
    held: Any = iter(())

    def hide(step: int, loss: Tensor) -> None:
        nonlocal held
        held = itertools.chain(() if healthy else held, iter((torch.ones(64) * step,)))

    return train(model, adam(model), after=hide, look="now")


@fault("memory.bounded_buffer")
def buffer_with_a_limit(healthy: bool) -> Watch:
    """A buffer of the newest outputs, which fills up to its limit: no leak."""
    model = TinyModel()
    newest: deque[Any] = deque(maxlen=30)
    return train(
        model, adam(model), after=lambda step, loss: newest.append(0 if healthy else torch.ones(64) * step), look="now"
    )


@fault("memory.cycle")
def dead_cycles(healthy: bool) -> Watch:
    """Dead objects in cycles, in a loop that has turned the collector off: no leak."""
    model, was_enabled = TinyModel(), gc.isenabled()

    class Node:
        pass

    def tie(step: int, loss: Tensor) -> None:
        node: Any = Node()
        node.values = torch.ones(64) * step
        node.me = None if healthy else node

    gc.disable()
    try:
        return train(model, adam(model), after=tie, look="now")
    finally:
        gc.enable() if was_enabled else None


@fault("memory.longer_batch")
def batches_grow(healthy: bool) -> Watch:
    """The newest output is kept, and batches become longer: no leak."""
    model = TinyModel()
    last: Any = None

    def keep(step: int, loss: Tensor) -> None:
        nonlocal last
        last = torch.ones(4, 8 if healthy else 8 + 8 * step, 64) * step

    return train(
        model, adam(model), batches=lambda step: batch_of(step, length=8 if healthy else 8 + 8 * step), after=keep,
        look="now",
    )  # fmt: skip


@fault("memory.clean")
def nothing_leaks(healthy: bool) -> Watch:
    """A sound loop; its twin lets a list grow."""
    return losses_kept(not healthy)


@fault("memory.warm_up")
def caches_fill(healthy: bool) -> list[Finding]:
    """Memory at rest that rises in the first steps and stays: tables that are made once for each length."""
    tables: dict[int, Tensor] = {}
    levels = []
    for step in range(40):
        length = 1 if healthy or step < 4 else step % 6
        tables.setdefault(length, torch.zeros(MIB))
        levels.append(sum(table.untyped_storage().nbytes() for table in tables.values()))
    verdict = judge_leak(levels, counter="bytes of the tables")
    return [make_finding("memory.warm_up", verdict.text)] if verdict.verdict == "warm_up" else []


@fault("memory.fragmentation")
def pieces(healthy: bool) -> list[Finding]:
    """Blocks of growing length on an emulated card, whose freed segments fit nothing that comes later."""
    from ...estimate.allocator import CachingAllocator

    allocator, rest, peaks, reserved = CachingAllocator(2048 * MIB), [], [], []
    for step in range(40):
        size = 24 if healthy else 24 + 3 * step
        block = allocator.malloc(size * MIB)
        stats = allocator.stats()
        allocator.free(block)
        rest.append(allocator.stats().allocated)
        peaks.append(stats.peak_allocated)
        reserved.append(stats.reserved)
    verdict = judge_leak(rest, counter="allocated bytes", peak_bytes=peaks, reserved_bytes=reserved)
    return [make_finding("memory.fragmentation", verdict.text)] if verdict.verdict == "fragmentation" else []
