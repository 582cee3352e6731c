"""A hand-made tape of three layers, unrolled to five."""

from __future__ import annotations

import pytest

from workbench.estimate.assemble import line_up
from workbench.estimate.tape import Tape, Work
from workbench.estimate.unroll import NotUniformError, traced_layers, unroll, whole


def _tape(sizes_of_last: int = 8) -> Tape:
    """Each layer makes a weight; in forward it makes its output and drops its predecessor's."""
    tape = Tape(
        module_names=["", "layers.0", "layers.1", "layers.2"],
        module_layers=[-1, 0, 1, 2],
        operator_names=["parameter", "aten.mm"],
        phase_names=["load", "forward", "optimizer"],
    )

    def bear(size: int, operator: int, layer: int, phase: int) -> int:
        for column, value in (
            (tape.sizes, size), (tape.operators, operator), (tape.layers, layer), (tape.phases, phase),
            (tape.modules, layer + 1), (tape.events, len(tape.sizes)), (tape.event_layers, layer),
        ):  # fmt: skip
            column.append(value)
        return len(tape.sizes) - 1

    tape.marks.append((0, "load"))
    tape.phase_marks.append((0, 0))
    for layer in range(3):
        bear(100, 0, layer, 0)
    for name in ("prepare", "adapter", "first"):
        tape.marks.append((len(tape.events), name))
        tape.work_marks.append((0, name))
    tape.phase_marks.append((len(tape.events), 1))
    before = bear(1, 1, -1, 1)
    for layer in range(3):
        after = bear(sizes_of_last if layer == 2 else 8, 1, layer, 1)
        tape.events.append(~before)
        tape.event_layers.append(layer)
        tape.work.append(Work("aten.mm", (2, 3, 4), "float32", 48, 10, layer, 1))
        before = after
    tape.events.append(~before)
    tape.event_layers.append(-1)
    for name in ("step", "step_again", "zero", "end"):
        tape.marks.append((len(tape.events), name))
        tape.work_marks.append((len(tape.work), name))
    tape.phase_marks.append((len(tape.events), 2))
    return tape


def _curve(life: object) -> list[int]:
    live, curve = 0, []
    for event in life.events:  # type: ignore[attr-defined]  # a Life
        live += life.sizes[event] if event >= 0 else -life.sizes[~event]  # type: ignore[attr-defined]  # a Life
        curve.append(int(live))
    return curve


def test_five_layers_from_three() -> None:
    life = unroll(_tape(), 5)
    step = [500 + 8 + 1, 500 + 8]  # the output of the embedding is dropped in the first layer
    for _ in range(4):
        step += [500 + 16, 500 + 8]
    assert _curve(life) == [100, 200, 300, 400, 500, 501, *step, 500]
    assert int(life.weights.sum()) == 5


def test_a_whole_tape_is_kept() -> None:
    tape = _tape()
    assert whole(tape).events.tolist() == tape.events


def test_a_last_layer_that_differs_is_refused() -> None:
    with pytest.raises(NotUniformError, match="other storages"):
        unroll(_tape(sizes_of_last=9), 5)


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(NotUniformError, match="at least 3"):
        unroll(_tape(), 2)


def test_what_is_left_over_of_a_period_is_traced_too() -> None:
    assert traced_layers(26, 6) == 20
    assert traced_layers(32, 1) == 3


def test_a_segment_that_runs_again_makes_new_storages() -> None:
    schedule = line_up(unroll(_tape(), 5), gradient_accumulation_steps=1)
    births = schedule.events[schedule.events >= 0]
    assert len(births) == len(set(births.tolist()))
    assert [(item.name, item.step) for item in schedule.stretches if item.end > item.begin] == [
        ("load", None), ("first", 0), ("first", 1),
    ]  # fmt: skip
