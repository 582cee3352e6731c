"""Line the traced segments up into the life of a run: load, two optimizer steps, evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .loading import read_ahead
from .script import OUR_TRAINER, Script
from .unroll import Life

# AdamW makes its moments inside the first step(), after the first backward has freed its activations. The peak usually
# falls in step 2, so two steps are lined up.
NUM_STEPS = 2
# Micro-batches of one step that are lined up: the first makes gradients, a later one adds to them, one more shows
# whether reserved memory still grows.
MAX_MICRO_BATCHES = 3


@dataclass(frozen=True)
class Stretch:
    """One segment in its place.

    Attributes:
        name: Segment of the trace.
        step: Optimizer step, 0 for the first; None outside the steps.
        begin, end: Its events.
    """

    name: str
    step: int | None
    begin: int
    end: int


@dataclass(frozen=True)
class Schedule:
    """All events of a run.

    Attributes:
        events: Tokens and ``~token``, int64.
        sources: Token of ``life`` behind each token.
        phases: Index into ``Tape.phase_names`` of each event.
        stretches: Segments in order.
        life: What was lined up.
        script: Says how the model was loaded.
    """

    events: Any
    sources: Any
    phases: Any
    stretches: list[Stretch]
    life: Life
    script: Script = OUR_TRAINER

    @property
    def sizes(self) -> Any:
        """Bytes by token."""
        return self.life.sizes[self.sources]

    @property
    def categories(self) -> Any:
        """Index into MEMORY_CATEGORIES by token."""
        return self.life.categories[self.sources]


def line_up(life: Life, gradient_accumulation_steps: int, *, script: Script = OUR_TRAINER) -> Schedule:
    """Return the events of loading, ``NUM_STEPS`` optimizer steps and one evaluation batch.

    Args:
        life: The whole model's segments.
        gradient_accumulation_steps: Micro-batches of a step; more than MAX_MICRO_BATCHES change nothing.
        script: See ``Schedule``.
    """
    later = min(gradient_accumulation_steps, MAX_MICRO_BATCHES) - 1
    plan: list[tuple[str, int | None]] = [("load", None), ("prepare", None), ("adapter", None)]
    for step in range(NUM_STEPS):
        plan += [("first", step)] + [("later", step)] * later
        plan += [("step" if step == 0 else "step_again", step), ("zero", step)]
    if "evaluation" in life.starts:
        plan.append(("evaluation", None))
    schedule = replace(_Assembler(life).run(plan), script=script)
    return _with_reading_ahead(schedule) if script.loads_ahead else schedule


def _with_reading_ahead(schedule: Schedule) -> Schedule:
    tape = schedule.life.tape
    load = schedule.stretches[0]
    operators = np.array(tape.operator_names)[np.array(tape.operators)[schedule.life.sources[schedule.sources]]]
    moved = read_ahead(schedule.events[load.begin : load.end], schedule.sizes, operators)
    return replace(schedule, events=np.concatenate([moved, schedule.events[load.end :]]))


class _Assembler:
    def __init__(self, life: Life) -> None:
        self.life = life
        count = len(life.sizes)
        self.current = np.arange(count)
        self.sources = [np.arange(count)]
        self.num_tokens = count
        self.seen: set[str] = set()
        self.born: dict[str, Any] = {}
        for name, (begin, end) in life.starts.items():
            events = life.events[begin:end]
            self.born[name] = events[events >= 0]

    def run(self, plan: list[tuple[str, int | None]]) -> Schedule:
        life = self.life
        pieces, phases, stretches, length = [], [], [], 0
        for name, step in plan:
            begin, end = life.starts[name]
            if name in self.seen:
                self._renew(name)
            self.seen.add(name)
            events = life.events[begin:end]
            tokens = np.where(events >= 0, events, ~events)
            mapped = self.current[tokens]
            pieces.append(np.where(events >= 0, mapped, ~mapped))
            phases.append(life.phases[begin:end])
            stretches.append(Stretch(name, step, length, length + end - begin))
            length += end - begin
        return Schedule(
            events=np.concatenate(pieces),
            sources=np.concatenate(self.sources),
            phases=np.concatenate(phases),
            stretches=stretches,
            life=life,
        )

    def _renew(self, name: str) -> None:
        """Give the storages that a segment makes new tokens: it runs again."""
        born = self.born[name]
        self.current[born] = np.arange(self.num_tokens, self.num_tokens + len(born))
        self.sources.append(born)
        self.num_tokens += len(born)
