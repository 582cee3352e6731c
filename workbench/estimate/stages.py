"""A pipeline stage of an unrolled run: its own layers, and the micro-batches it keeps while later stages compute.

Under 1F1B a stage runs forward of as many micro-batches as there are stages from it to the end before its first
backward, and keeps their activations; the embedding is on the first stage only, norm, head and loss on the last.

Source:
    Narayanan et al. 2021, arXiv:2104.04473, section 2.2: stage ``i`` of ``p`` holds at most ``p - i`` micro-batches;
    the bubble is ``(p - 1) / m`` of the ideal time. ``Schedule1F1B`` of torch/distributed/pipelining/schedules.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..events import MEMORY_CATEGORIES
from .tape import NO_LAYER, Tape
from .unroll import Life

_ACTIVATION = MEMORY_CATEGORIES.index("activation")
_BEFORE, _INSIDE, _AFTER = -1, 0, 1


def stage_life(life: Life, *, is_first: bool, is_last: bool, in_flight: int, is_tied: bool) -> Life:
    """Return the life of one stage.

    Args:
        life: Of a model with as many layers as the stage has.
        is_first: Whether the embedding is here.
        is_last: Whether norm, head and loss are here.
        in_flight: Micro-batches whose activations are kept at once.
        is_tied: Whether the head uses the embedding's weights, so that the last stage has a copy of them.
    """
    places = _places(life.tape)[life.sources]
    dropped = np.zeros(len(places), dtype=bool)
    if not is_last:
        dropped |= places == _AFTER
    if not is_first and not (is_last and is_tied):
        # What the embedding gives to the first layer arrives from the stage before, and takes the same room.
        dropped |= (places == _BEFORE) & (life.categories != _ACTIVATION)
    return _hold(_without(life, dropped), in_flight - 1)


def only_layers(life: Life, kept: range) -> Life:
    """Return the life with some of the layers of a trace that covers the whole model."""
    layers = np.array(life.tape.layers)[life.sources]
    outside = (layers != NO_LAYER) & ((layers < kept.start) | (layers >= kept.stop))
    worked = np.array([work.layer for work in life.tape.work])
    runs = (worked == NO_LAYER) | ((worked >= kept.start) & (worked < kept.stop))
    return replace(_without(life, outside), weights=life.weights * runs)


def _places(tape: Tape) -> Any:
    """Return for each token whether it was made before the layers, in them or after them."""
    places = np.zeros(len(tape.sizes), dtype=np.int8)
    backward = {index for index, name in enumerate(tape.phase_names) if name in ("backward", "recompute")}
    for begin, end in tape.segments().values():
        births = [event for event in tape.events[begin:end] if event >= 0]
        for goes_back in (False, True):
            part = [token for token in births if (tape.phases[token] in backward) == goes_back]
            inside = [index for index, token in enumerate(part) if tape.layers[token] != NO_LAYER]
            if not inside:
                continue
            edge = inside[-1] if goes_back else inside[0]
            early, late = (_AFTER, _BEFORE) if goes_back else (_BEFORE, _AFTER)
            for index, token in enumerate(part):
                if tape.layers[token] == NO_LAYER:
                    places[token] = early if index < edge else late
    return places


def _without(life: Life, dropped: Any) -> Life:
    tokens = np.where(life.events >= 0, life.events, ~life.events)
    kept = ~dropped[tokens]
    moved = np.concatenate([[0], np.cumsum(kept)])
    starts = {name: (int(moved[begin]), int(moved[end])) for name, (begin, end) in life.starts.items()}
    return replace(life, events=life.events[kept], phases=life.phases[kept], starts=starts)


def _hold(life: Life, count: int) -> Life:
    """Keep the activations of ``count`` more micro-batches through each micro-batch."""
    if count <= 0:
        return life
    names = life.tape.phase_names
    backward = names.index("backward")
    pieces, phases, starts, length = [], [], {}, 0
    sources, sizes, categories = [life.sources], [life.sizes], [life.categories]
    num_tokens = len(life.sizes)
    for name, (begin, end) in sorted(life.starts.items(), key=lambda item: item[1]):
        events, phase = life.events[begin:end], life.phases[begin:end]
        if name in ("first", "later"):
            kept = _kept(events, phase, backward)
            copies = np.tile(kept, count)
            fresh = np.arange(num_tokens, num_tokens + len(copies))
            num_tokens += len(copies)
            for column, values in ((sources, life.sources), (sizes, life.sizes), (categories, life.categories)):
                column.append(values[copies])
            events = np.concatenate([fresh, events, ~fresh])
            ends = np.full(len(fresh), phase[-1], dtype=phase.dtype)
            phase = np.concatenate([np.full(len(fresh), phase[0], dtype=phase.dtype), phase, ends])
        pieces.append(events)
        phases.append(phase)
        starts[name] = (length, length + len(events))
        length += len(events)
    return replace(
        life,
        events=np.concatenate(pieces),
        phases=np.concatenate(phases),
        starts=starts,
        sources=np.concatenate(sources),
        sizes=np.concatenate(sizes),
        categories=np.concatenate(categories),
    )


def _kept(events: Any, phases: Any, backward: int) -> Any:
    """Return the tokens that forward made and that are alive when backward begins."""
    found = np.flatnonzero(phases == backward)
    before = events[: found[0]] if len(found) else events
    return np.setdiff1d(before[before >= 0], ~before[before < 0], assume_unique=True)
