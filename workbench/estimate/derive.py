"""The segment of a later micro-batch, derived from that of the first.

The two differ in one thing: the first keeps each new gradient, a later one adds it to the kept one and drops it. A test
holds the derived segment equal to what real tensors do.
"""

from __future__ import annotations

from collections.abc import Mapping

from .tape import Tape


def derive_later(tape: Tape, accumulated: Mapping[int, int], copied: frozenset[int]) -> None:
    """Append the segment ``later`` to a tape that ends with the segment ``first``.

    Args:
        tape: The tape.
        accumulated: ``{token of a gradient: number of events when it was kept}``.
        copied: Gradients that AccumulateGrad copied because it could not keep what it was given; a later micro-batch
            makes no such copy.
    """
    begin, name = tape.marks[-1]
    if name != "first":
        raise ValueError(f"the tape ends with {name!r}; it has to end with 'first'.")
    end = len(tape.events)
    ends_at: dict[int, list[int]] = {}
    for token, count in accumulated.items():
        if token not in copied:
            ends_at.setdefault(count, []).append(token)
    fresh: dict[int, int] = {}
    marks = [(at, phase) for at, phase in tape.phase_marks if at >= begin]
    wanted = {at for at, _ in marks}
    moved: dict[int, int] = {}
    events, layers = tape.events, tape.event_layers
    tape.marks.append((end, "later"))
    for index in range(begin, end + 1):
        if index in ends_at:
            for token in ends_at[index]:
                events.append(~fresh[token])
                layers.append(tape.layers[token])
        if index in wanted:
            moved[index] = len(events)
        if index == end:
            break
        event = events[index]
        token = event if event >= 0 else ~event
        if token in copied:
            continue
        if event >= 0:
            fresh[token] = _copy_token(tape, token)
            events.append(fresh[token])
        else:
            events.append(~fresh[token])
        layers.append(layers[index])
    tape.phase_marks.extend([(moved[at], phase) for at, phase in marks])
    _copy_work(tape, accumulated)


def _copy_token(tape: Tape, token: int) -> int:
    for column in (tape.sizes, tape.modules, tape.operators, tape.layers, tape.phases):
        column.append(column[token])
    copy = len(tape.sizes) - 1
    if tape.categories.get(token, "gradient") != "gradient":
        tape.categories[copy] = tape.categories[token]
    return copy


def _copy_work(tape: Tape, accumulated: Mapping[int, int]) -> None:
    begin = tape.work_marks[-1][0]
    works = tape.work[begin:]
    tape.work_marks.append((len(tape.work), "later"))
    tape.work.extend(works)
    if not works:
        return
    backward = tape.phase_names.index("backward")
    plain = works[-1]._replace(operator="aten.add_", shape=(), flops=0, phase=backward)
    for token in accumulated:  # reads both, writes one
        tape.work.append(plain._replace(num_bytes=3 * tape.sizes[token], layer=tape.layers[token]))
