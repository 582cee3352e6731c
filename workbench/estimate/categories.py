"""Give every storage of a tape its category, as torch.profiler names them."""

from __future__ import annotations

from ..events import MEMORY_CATEGORIES
from .tape import Tape

CATEGORY_INDEX = {name: index for index, name in enumerate(MEMORY_CATEGORIES)}


def categorize(tape: Tape) -> list[int]:
    """Return an index into MEMORY_CATEGORIES for every token.

    Parameters, inputs, gradients and optimizer state are known by what refers to them. Of the rest:

    * made in forward (or recomputed) and still alive when backward begins (or goes on): ``activation``;
    * made in backward: ``autograd_detail``;
    * everything else: ``temporary``.
    """
    phase_of = tape.phase_names
    result = [CATEGORY_INDEX["temporary"]] * len(tape.sizes)
    survivors = _survivors(tape)
    for token in range(len(tape.sizes)):
        named = tape.categories.get(token)
        if named is None:
            phase = phase_of[tape.phases[token]]
            if phase == "load":
                named = "parameter"
            elif phase == "backward":
                named = "autograd_detail"
            elif phase in ("forward", "recompute") and token in survivors:
                named = "activation"
            else:
                continue
        result[token] = CATEGORY_INDEX[named]
    return result


def _survivors(tape: Tape) -> set[int]:
    """Return tokens that outlive the stretch of forward or recompute they were born in."""
    kept: set[int] = set()
    born: set[int] = set()
    phases = iter([*tape.phase_marks, (len(tape.events), -1)])
    begin, phase = next(phases)
    for end, following in phases:
        name = tape.phase_names[phase]
        if name in ("forward", "recompute"):
            born.clear()
            for event in tape.events[begin:end]:
                if event >= 0:
                    born.add(event)
                else:
                    born.discard(~event)
            kept |= born
        begin, phase = end, following
    return kept
