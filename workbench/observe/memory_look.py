"""A deep look at memory over a bounded window of steps: which storages stay, by which line, and how the graphs grow.

Costs about half a step for each step of the window, plus three walks over all Python objects; the look says so in
``cost_s``. What it yields is plain data; ``diagnose.survivors`` judges it.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .graph_nodes import count_nodes, live_tensors, next_node_number
from .storages import Birth, StorageTracker

Site = tuple[str, str, str]  # line, operator, module


@dataclass
class MemoryLook:
    """What one window saw. Index i of each series is the border after the window's step i.

    Attributes:
        steps: Step numbers of the borders.
        tokens: Token slots of the batch of each step; 0 where unknown.
        rest_bytes: Live bytes of tracked storages at each border.
        site_bytes: Per site, live bytes at each border.
        nodes: ``(index, reachable autograd nodes)`` at a few borders.
        num_parameters: Parameters of the model when the window opened and closed.
        num_hooks: Hooks on its modules, likewise.
        survivors: What was born in the window and still lives after a collection, the newest steps left out.
        freed_by_gc_bytes: What only the collection freed at the end.
        cost_s: Seconds the look itself took beside the tracking.
        first_node: Number of the first autograd node that was made in the window; 0 where it was never opened.
    """

    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rest_bytes: list[int] = field(default_factory=list)
    site_bytes: dict[Site, list[int]] = field(default_factory=dict)
    nodes: list[tuple[int, int]] = field(default_factory=list)
    num_parameters: list[int] = field(default_factory=list)
    num_hooks: list[int] = field(default_factory=list)
    survivors: list[Birth] = field(default_factory=list)
    evaluation_steps: set[int] = field(default_factory=set)
    freed_by_gc_bytes: int = 0
    freed_by_gc: list[Birth] = field(default_factory=list)
    cost_s: float = 0.0
    mutations: dict[int, str] = field(default_factory=dict)
    first_node: int = 0


MIN_AGE = 3  # Steps a storage must outlive: the loop's own variables live for one.


class MemoryProbe:
    """Runs one look: ``open``, ``border`` after each step, ``close``."""

    def __init__(self, model: nn.Module | None, optimizer: Any, *, length: int) -> None:
        self.model = model
        self.length = length
        self.look = MemoryLook()
        self.tracker = StorageTracker(model)
        self.tracker.register_existing(known_tensors(model, optimizer))
        self.is_open = False

    def open(self, step: int) -> None:
        """Begin to track; ``step`` is the number of the step about to run."""
        started = time.perf_counter()
        gc.collect()
        self.tracker.step = step
        self._count_modules()
        self.look.first_node = next_node_number()
        self.tracker.__enter__()
        self.is_open = True
        self.look.cost_s += time.perf_counter() - started

    def border(self, step: int, tokens: int) -> bool:
        """Sample after a step and return whether the window is full."""
        started = time.perf_counter()
        look = self.look
        index = len(look.steps)
        look.steps.append(step)
        look.tokens.append(tokens)
        by_site: dict[Site, int] = defaultdict(int)
        for birth in self.tracker.live():
            if birth.step >= 0:
                by_site[(birth.line, birth.op, birth.module)] += birth.num_bytes
        look.rest_bytes.append(sum(by_site.values()))
        for site in by_site.keys() | look.site_bytes.keys():
            series = look.site_bytes.setdefault(site, [0] * index)
            series.append(by_site.get(site, 0))
        if index in (1, self.length // 2, self.length - 1):
            look.nodes.append((index, self._count_nodes()))
        self.tracker.step = step + 1
        look.cost_s += time.perf_counter() - started
        return index + 1 >= self.length

    def extend(self, length: int) -> None:
        """Watch ``length`` more steps."""
        self.length += length

    def survivors_so_far(self) -> list[Birth]:
        """Return what was born in the window, MIN_AGE steps ago or more, and still lives."""
        newest = self.look.steps[-1] if self.look.steps else 0
        return [birth for birth in self.tracker.births if birth.is_alive and 0 <= birth.step <= newest - MIN_AGE]

    def close(self) -> MemoryLook:
        """End the tracking, collect garbage and return the look."""
        started = time.perf_counter()
        if self.is_open:
            self.tracker.__exit__(None, None, None)
            self.is_open = False
        look = self.look
        before = self.survivors_so_far()
        gc.collect()
        look.survivors = [birth for birth in before if birth.is_alive]
        look.freed_by_gc = [birth for birth in before if not birth.is_alive]
        look.freed_by_gc_bytes = sum(birth.num_bytes for birth in look.freed_by_gc)
        look.evaluation_steps = {birth.step for birth in self.tracker.births if birth.phase == "evaluation"}
        look.mutations = dict(self.tracker.mutations)
        if look.nodes and look.nodes[-1][0] != len(look.steps) - 1:
            look.nodes.append((len(look.steps) - 1, self._count_nodes()))
        self._count_modules()
        look.cost_s += time.perf_counter() - started
        return look

    def _count_nodes(self) -> int:
        return count_nodes(tensor for tensor in live_tensors() if tensor.grad_fn is not None)

    def _count_modules(self) -> None:
        if self.model is None:
            return
        modules = list(self.model.modules())
        self.look.num_parameters.append(sum(parameter.numel() for parameter in self.model.parameters()))
        names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self.look.num_hooks.append(sum(len(getattr(module, name, ())) for module in modules for name in names))


def known_tensors(model: nn.Module | None, optimizer: Any) -> list[Tensor]:
    """Return parameters, buffers, gradients and optimizer state: what exists before a window opens."""
    found: list[Tensor] = []
    if model is not None:
        parameters = list(model.parameters())
        found += [*parameters, *model.buffers()]
        found += [parameter.grad for parameter in parameters if parameter.grad is not None]
    for state in getattr(optimizer, "state", {}).values():
        if isinstance(state, dict):
            found += [value for value in state.values() if isinstance(value, Tensor)]
    return found


def tensors_of_storages(births: list[Birth], *, limit: int = 200) -> list[tuple[Tensor, Birth]]:
    """Return Python tensors that view the storages of ``births``; storages held by autograd alone have none."""
    wanted: dict[int, Birth] = {}
    for birth in births[-limit:]:
        storage = birth.ref() if birth.ref is not None else None
        if storage is not None:
            wanted[int(storage._cdata)] = birth
        del storage
    found = []
    for tensor in live_tensors():
        try:
            birth_or_none = wanted.get(int(tensor.untyped_storage()._cdata))
        except (NotImplementedError, RuntimeError):
            continue
        if birth_or_none is not None:
            found.append((tensor, birth_or_none))
    return found
