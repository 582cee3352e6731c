"""Turn the tape of a model with few layers into that of the whole model, as events.

Equal layers make equal storages. Of a trace with four layers (first, middle, middle, last) the third is the template:
its stretch of the forward pass, of recomputation, of backward and of the optimizer is repeated for every layer that is
missing. A storage may die in the stretch of a neighbour (the residual stream does); such deaths are repeated one layer
further. Where the two middle layers are not equal, or the template ends something that belongs to no layer, the trace
cannot be extended and the whole model has to be traced.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .categories import categorize
from .tape import NO_LAYER, Tape

# Layers (or whole periods of layers) of a trace that can be extended: first, two in the middle, last.
TRACED_LAYERS = 4


class NotUniformError(Exception):
    """The layers of a trace are not equal enough to be repeated; the message says what differs."""


@dataclass(frozen=True)
class Life:
    """Events and storages of a whole model as arrays.

    Attributes:
        events: Tokens (births) and ``~token`` (deaths), int64.
        sizes: Bytes by token.
        categories: Index into MEMORY_CATEGORIES by token.
        sources: Token of the tape that each token was copied from; its module and operator are the source's.
        starts: ``{segment: (first event, end)}``.
        phases: Index into ``Tape.phase_names`` of each event.
        weights: How often each entry of ``tape.work`` happens.
        tape: The trace.
    """

    events: Any
    sizes: Any
    categories: Any
    sources: Any
    starts: dict[str, tuple[int, int]]
    phases: Any
    weights: Any
    tape: Tape


def whole(tape: Tape) -> Life:
    """Return the life of a tape that already covers the whole model."""
    count = len(tape.sizes)
    return Life(
        events=np.array(tape.events, dtype=np.int64),
        sizes=np.array(tape.sizes, dtype=np.int64),
        categories=np.array(categorize(tape), dtype=np.int8),
        sources=np.arange(count),
        starts=tape.segments(),
        phases=_event_phases(tape),
        weights=np.ones(len(tape.work), dtype=np.int64),
        tape=tape,
    )


def traced_layers(num_layers: int, period: int) -> int:
    """Return how many layers to trace: four whole periods, and what is left over after the last whole one."""
    return TRACED_LAYERS * period + num_layers % period


def unroll(tape: Tape, num_layers: int, period: int = 1) -> Life:
    """Return the life of a model with ``num_layers`` layers from the tape of one with four periods of layers.

    Args:
        tape: Trace of ``traced_layers(num_layers, period)`` layers.
        num_layers: Layers of the whole model.
        period: Layers after which the kinds of layers repeat.

    Raises:
        NotUniformError: The layers differ.
    """
    if num_layers // period < TRACED_LAYERS:
        raise NotUniformError(f"{num_layers} layers are not at least {TRACED_LAYERS} periods of {period}.")
    return _Unroller(tape, num_layers // period, period).run()


def _event_phases(tape: Tape) -> Any:
    phases = np.zeros(len(tape.events), dtype=np.int8)
    for begin, phase in tape.phase_marks:
        phases[begin:] = phase
    return phases


class _Unroller:
    def __init__(self, tape: Tape, num_blocks: int, period: int) -> None:
        self.tape = tape
        self.copies = num_blocks - TRACED_LAYERS
        self.template, self.last = TRACED_LAYERS - 2, TRACED_LAYERS - 1
        events = np.array(tape.events, dtype=np.int64)
        self.tokens = np.where(events >= 0, events, ~events)
        self.is_birth = events >= 0
        block_of = np.array(tape.layers, dtype=np.int64)
        block_of = np.where(block_of >= 0, block_of // period, NO_LAYER)
        labels = np.array(tape.event_layers, dtype=np.int64)
        labels = np.where(labels >= 0, labels // period, NO_LAYER)
        self.block_of = block_of
        self.labels = np.where(labels == NO_LAYER, block_of[self.tokens], labels)
        self.phases = _event_phases(tape)
        self.period = period

    def run(self) -> Life:
        tape, count = self.tape, len(self.tape.sizes)
        rows = self._rows()
        num_template = rows.shape[1]
        ordinal = np.full(count, -1, dtype=np.int64)
        for block in (self.template - 1, self.template, self.last):
            ordinal[self.block_of == block] = np.arange(num_template)
        pieces, phase_pieces, starts = self._events(rows, ordinal)
        template_tokens = rows[1]
        sources = np.concatenate([np.arange(count)] + [template_tokens] * self.copies)
        sizes = np.array(tape.sizes, dtype=np.int64)[sources]
        for token, shares in tape.growth.items():
            inside = [share for layer, share in shares.items() if layer // self.period == self.template]
            sizes[token] += self.copies * sum(inside)
        categories = np.array(categorize(tape), dtype=np.int8)[sources]
        layers = np.array([work.layer for work in tape.work], dtype=np.int64)
        weights = np.where((layers >= 0) & (layers // self.period == self.template), 1 + self.copies, 1)
        return Life(
            events=np.concatenate(pieces),
            sizes=sizes,
            categories=categories,
            sources=sources,
            starts=starts,
            phases=np.concatenate(phase_pieces),
            weights=weights,
            tape=tape,
        )

    def _rows(self) -> Any:
        """Return tokens by layer: the one before the template, the template, its copies, the last; equal columns."""
        tape = self.tape
        members = {
            block: np.flatnonzero(self.block_of == block) for block in (self.template - 1, self.template, self.last)
        }
        sizes, operators = np.array(tape.sizes, dtype=np.int64), np.array(tape.operators, dtype=np.int64)
        template = members[self.template]
        for block, tokens in members.items():
            if len(tokens) != len(template):
                raise NotUniformError(f"layer {block} makes {len(tokens)} storages, its neighbour {len(template)}.")
            if not (
                np.array_equal(sizes[tokens], sizes[template])
                and np.array_equal(operators[tokens], operators[template])
            ):
                raise NotUniformError(f"layer {block} makes other storages than its neighbour.")
        num = len(template)
        fresh = len(tape.sizes) + np.arange(self.copies * num).reshape(self.copies, num)
        return np.vstack([members[self.template - 1], template, fresh, members[self.last]])

    def _events(self, rows: Any, ordinal: Any) -> tuple[list[Any], list[Any], dict[str, tuple[int, int]]]:
        labels, tokens = self.labels, self.tokens
        cuts = np.flatnonzero(labels[1:] != labels[:-1]) + 1
        marks = [index for index, _ in self.tape.marks]
        backward = self._backward_phases()
        bounds = sorted({0, len(labels), *cuts.tolist(), *marks})
        pieces: list[Any] = []
        phase_pieces: list[Any] = []
        new_start: dict[int, int] = {}
        length = 0
        for begin, end in itertools.pairwise(bounds):
            new_start[begin] = length
            stretch = tokens[begin:end]
            signs = self.is_birth[begin:end]
            phase = self.phases[begin:end]
            if labels[begin] == self.template:
                before = labels[begin - 1] if begin else NO_LAYER
                descending = backward[phase[0]] or before == self.last
                group = self._template_run(stretch, rows, ordinal, descending=bool(descending))
            elif labels[begin] == self.last:
                mapped = stretch.copy()
                inside = self.block_of[stretch] == self.template
                mapped[inside] = rows[-2, ordinal[stretch[inside]]]
                group = [mapped]
            else:
                group = [stretch]
            for mapped in group:
                pieces.append(np.where(signs, mapped, ~mapped))
                phase_pieces.append(phase)
                length += len(mapped)
        new_start[len(labels)] = length
        segments = self.tape.segments()
        starts = {name: (new_start[begin], new_start[end]) for name, (begin, end) in segments.items()}
        return pieces, phase_pieces, starts

    def _template_run(self, stretch: Any, rows: Any, ordinal: Any, *, descending: bool) -> list[Any]:
        """Return the template's stretch for itself and for every copy, in the order the run meets them."""
        blocks = self.block_of[stretch]
        offset = np.full(len(stretch), -9, dtype=np.int64)
        for block, step in ((self.template - 1, -1), (self.template, 0), (self.last, 1)):
            offset[blocks == block] = step
        if (offset == -9).any():
            raise NotUniformError("a middle layer ends a storage that belongs to no neighbour.")
        columns = ordinal[stretch]
        order = range(self.copies + 1)
        return [rows[1 + copy + offset, columns] for copy in (reversed(order) if descending else order)]

    def _backward_phases(self) -> list[bool]:
        return [name in ("backward", "recompute") for name in self.tape.phase_names]
