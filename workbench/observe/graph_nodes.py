"""Autograd nodes that are still reachable: the only trace of the most taught leak, which moves no tensor bytes."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .storages import tensors_in


def live_tensors() -> list[Tensor]:
    """Return every tensor that Python knows; walks all objects of the garbage collector (tens of milliseconds)."""
    found = []
    for value in gc.get_objects():
        # type() and not isinstance(): the latter calls __class__ of lazy proxies and imports half the world.
        if issubclass(type(value), Tensor):
            found.append(value)
    return found


def count_nodes(tensors: Iterable[Tensor], *, max_nodes: int = 2_000_000) -> int:
    """Return how many autograd nodes the graphs of ``tensors`` reach, each counted once."""
    return len(reachable_nodes((tensor.grad_fn for tensor in tensors), max_nodes=max_nodes))


def reachable_nodes(roots: Iterable[Any], *, max_nodes: int = 2_000_000) -> set[Any]:
    """Return the nodes reached from ``roots`` through ``next_functions``.

    The set keeps the Python wrappers alive, so that each node keeps one identity while the walk lasts.
    """
    seen = {root for root in roots if root is not None}
    queue = list(seen)
    while queue and len(seen) < max_nodes:
        for node, _ in queue.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                queue.append(node)
    return seen


def heaviest_roots(tensors: Iterable[Tensor], count: int = 3) -> list[tuple[Tensor, int]]:
    """Return the tensors whose graphs reach most nodes, with the number of nodes, heaviest first."""
    sized = [
        (tensor, len(reachable_nodes([tensor.grad_fn], max_nodes=200_000)))
        for tensor in tensors
        if tensor.grad_fn is not None
    ]
    sized.sort(key=lambda pair: -pair[1])
    return sized[:count]


def next_node_number() -> int:
    """Return the number that autograd gives next: what this thread computed before has a lower one."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.ones((), requires_grad=True).clone().grad_fn
    return int(node._sequence_nr()) + 1


def made_since(tensors: Iterable[Tensor], number: int) -> list[Tensor]:
    """Return the tensors whose newest operation has this number or a higher one.

    A graph that was there before, such as a total that an earlier cell of a notebook left behind, does not grow:
    however large, it is not what grows now.
    """
    found = []
    for tensor in tensors:
        node: Any = tensor.grad_fn
        # Nodes written in Python may not tell their number; they are not left out.
        if node is not None and (not hasattr(node, "_sequence_nr") or node._sequence_nr() >= number):
            found.append(tensor)
    return found


def count_with_graph(container: Iterable[Any]) -> int:
    """Return how many entries of a collection, or values of a mapping, hold a tensor with a graph."""
    entries = container.values() if isinstance(container, dict) else container
    return sum(any(tensor.grad_fn is not None for tensor in tensors_in(entry)) for entry in entries)
