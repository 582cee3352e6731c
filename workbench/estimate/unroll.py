"""Turn the tape of a model with few layers into that of the whole model, as events.

Equal layers make equal storages. Of a trace with three layers the middle one is the template: its stretch of the
forward pass, of recomputation, of backward and of the optimizer is repeated for every layer that is missing. A storage
may die in the stretch of a neighbour (the residual stream does); such deaths are repeated one layer further. The first
layer may differ in backward (nothing below it needs a gradient), the last may not. Where the template ends something
that belongs to no neighbour, the trace cannot be extended and the whole model has to be traced.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .categories import categorize
from .tape import NO_LAYER, Tape

# Layers (or whole periods of layers) of a trace that can be extended: first, middle, last.
TRACED_LAYERS = 3


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
    """Return how many layers to trace: three whole periods, and what is left over after the last whole one."""
    return TRACED_LAYERS * period + num_layers % period


def unroll(tape: Tape, num_layers: int, period: int = 1) -> Life:
    """Return the life of a model with ``num_layers`` layers from the tape of one with three periods of layers.

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


def _require_lives(events: Any, rows: Any) -> None:
    """Check that every copy of a storage begins once and ends as often as the one it was copied from.

    Likes of the first layer are found by place and size; where they are not each other's, one copy ends twice and
    another never.

    Raises:
        NotUniformError: One does not.
    """
    count = int(rows.max()) + 1
    births = np.bincount(events[events >= 0], minlength=count)
    deaths = np.bincount(~events[events < 0], minlength=count)
    template, copies = rows[1], rows[2:]
    if (births[copies] != births[template]).any() or (deaths[copies] != deaths[template]).any():
        raise NotUniformError("storages of the layers between first and last do not begin and end alike.")


class _Unroller:
    def __init__(self, tape: Tape, num_blocks: int, period: int) -> None:
        self.tape = tape
        self.copies = num_blocks - TRACED_LAYERS
        self.template, self.last = 1, 2
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
        ordinal = np.full(count, -1, dtype=np.int64)
        for row in (rows[0], rows[1], rows[-1]):
            known = row >= 0
            ordinal[row[known]] = np.flatnonzero(known)
        pieces, phase_pieces, starts = self._events(rows, ordinal)
        events = np.concatenate(pieces)
        _require_lives(events, rows)
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
            events=events,
            sizes=sizes,
            categories=categories,
            sources=sources,
            starts=starts,
            phases=np.concatenate(phase_pieces),
            weights=weights,
            tape=tape,
        )

    def _rows(self) -> Any:
        """Return tokens by layer: the one before the template, the template, its copies, the last; equal columns.

        Of the layer before only what it makes like the template has a column; the rest of its row is -1.
        """
        sizes, operators = np.array(self.tape.sizes, dtype=np.int64), np.array(self.tape.operators, dtype=np.int64)
        first, template, last = (np.flatnonzero(self.block_of == block) for block in range(TRACED_LAYERS))
        if len(last) != len(template):
            raise NotUniformError(f"the last layer makes {len(last)} storages, the one before it {len(template)}.")
        if not (np.array_equal(sizes[last], sizes[template]) and np.array_equal(operators[last], operators[template])):
            raise NotUniformError("the last layer makes other storages than the one before it.")
        groups = self._groups()
        before = np.full(len(template), -1, dtype=np.int64)
        for group in np.unique(groups[template]):
            columns = np.flatnonzero(groups[template] == group)
            mine, other = template[columns], first[groups[first] == group]
            if (
                len(mine) == len(other)
                and np.array_equal(sizes[mine], sizes[other])
                and np.array_equal(operators[mine], operators[other])
            ):
                before[columns] = other
            else:
                before[columns] = self._likes(mine.tolist(), other.tolist())
        num = len(template)
        fresh = len(self.tape.sizes) + np.arange(self.copies * num).reshape(self.copies, num)
        return np.vstack([before, template, fresh, last])

    def _likes(self, tokens: list[int], others: list[int]) -> list[int]:
        """Return for each of a layer's storages its like among ``others`` of a layer that differs in some, or -1.

        The first layer differs where what it reads needs no gradient (nothing of it is kept, so nothing compressed) or
        has another dtype than the sums of the later layers. Likes come from the same operator of the same module and
        have the same size. Where one layer makes more of them, the last ones correspond: they outlive the layer.
        """
        known: dict[tuple[str, int, int], list[int]] = {}
        for token in others:
            known.setdefault(self._place(token), []).append(token)
        found = []
        for token in reversed(tokens):
            like = known.get(self._place(token))
            found.append(like.pop() if like else -1)
        return found[::-1]

    def _place(self, token: int) -> tuple[str, int, int]:
        """Return module inside its period of layers, operator and bytes of a storage."""
        tape, layer = self.tape, self.tape.layers[token]
        _, _, inside = f"{tape.module_names[tape.modules[token]]}.".partition(f".{layer}.")
        return f"{layer % self.period}.{inside}", tape.operators[token], tape.sizes[token]

    def _groups(self) -> Any:
        """Return a number for the segment and phase that each token was born in."""
        births = np.zeros(len(self.tape.sizes), dtype=np.int64)
        births[self.tokens[self.is_birth]] = np.flatnonzero(self.is_birth)
        segments = np.searchsorted([index for index, _ in self.tape.marks], births, side="right")
        return segments * len(self.tape.phase_names) + np.array(self.tape.phases, dtype=np.int64)

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
        if (columns < 0).any():
            raise NotUniformError("a middle layer ends a storage of the first layer that has no like in later ones.")
        order = range(self.copies + 1)
        return [rows[1 + copy + offset, columns] for copy in (reversed(order) if descending else order)]

    def _backward_phases(self) -> list[bool]:
        return [name in ("backward", "recompute") for name in self.tape.phase_names]
