"""The tape: every birth and death of a storage, in host order, with where it happened. Plain lists, no tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

# Labels of events and storages that belong to no repeated layer.
NO_LAYER = -1

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass
class Tape:
    """Storages and operators of one trace.

    A token numbers a storage. An event is a token (birth) or ``~token`` (death).

    Attributes:
        events: Births and deaths in host order.
        event_layers: Layer whose code was running at each event; NO_LAYER outside the repeated layers.
        sizes: Bytes of each token.
        modules: Index into ``module_names`` of each token's birth.
        operators: Index into ``operator_names`` of each token's birth.
        layers: Layer of each token's birth.
        phases: Index into ``phase_names`` of each token's birth.
        categories: Category of each token, decided when the trace ends (see ``categories.py``).
        growth: ``{token: {layer: bytes}}`` of storages that hold something of every layer.
        marks: ``(event index, segment name)``: where each segment begins.
        phase_marks: ``(event index, phase)``: where each stretch of one phase begins.
        work: Operators for the time estimate, see ``Work``.
        work_marks: ``(work index, segment name)``.
    """

    module_names: list[str] = field(default_factory=lambda: [""])
    module_layers: list[int] = field(default_factory=lambda: [NO_LAYER])
    operator_names: list[str] = field(default_factory=list)
    phase_names: list[str] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    event_layers: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    modules: list[int] = field(default_factory=list)
    operators: list[int] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)
    categories: dict[int, str] = field(default_factory=dict)
    growth: dict[int, dict[int, int]] = field(default_factory=dict)
    marks: list[tuple[int, str]] = field(default_factory=list)
    phase_marks: list[tuple[int, int]] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    work_marks: list[tuple[int, str]] = field(default_factory=list)

    def segments(self) -> dict[str, tuple[int, int]]:
        """Return ``{segment: (first event, end)}``."""
        ends = [index for index, _ in self.marks[1:]] + [len(self.events)]
        return {name: (start, end) for (start, name), end in zip(self.marks, ends, strict=True)}

    def work_segments(self) -> dict[str, tuple[int, int]]:
        """Return ``{segment: (first work, end)}``."""
        ends = [index for index, _ in self.work_marks[1:]] + [len(self.work)]
        return {name: (start, end) for (start, name), end in zip(self.work_marks, ends, strict=True)}


class Work(NamedTuple):
    """What one operator does. A tuple, because a trace makes thousands and a dataclass takes ten times as long.

    Attributes:
        operator: E.g. ``"aten.mm"``.
        shape: ``(rows, inner, columns)`` of a matrix product (batches multiplied into the rows), ``(length, keys,
            head size)`` of the CPU's fused attention, else empty.
        dtype: Dtype of its first tensor, e.g. ``"bfloat16"``.
        flops: Floating-point operations, counted for matrix products and attention only.
        num_bytes: Bytes read and written.
        layer: Layer it belongs to, or NO_LAYER.
        phase: Index into ``Tape.phase_names``.
        access: ``"n"`` or ``"t"`` for each side of a product: whether it lies transposed in memory; ``"strided"`` where
            a plain operator's argument is not contiguous, else empty.
    """

    operator: str
    shape: tuple[int, ...]
    dtype: str
    flops: int
    num_bytes: int
    layer: int
    phase: int
    access: str = ""


def layer_of(path: str, layer_lists: frozenset[str]) -> int:
    """Return the layer number in a module path, or NO_LAYER.

    Args:
        path: E.g. ``"base_model.model.model.layers.3.mlp"``.
        layer_lists: Paths of the lists that hold the repeated layers, e.g. ``{"base_model.model.model.layers"}``.
    """
    for match in _LAYER.finditer(path):
        if path[: match.start(1) - 1] in layer_lists:
            return int(match.group(1))
    return NO_LAYER
