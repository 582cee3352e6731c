from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from workbench.errors import Cancelled
from workbench.estimate import estimate_run
from workbench.estimate.shape import shape_of_lengths
from workbench.events import Cancel, Progress
from workbench.hardware import find_device
from workbench.plan import NothingFitsError, PlanOption, explicit_fields, find_settings, make_fit
from workbench.plan.search import NOTABLE, beats
from workbench.plan.space import SPLIT_FIELDS, dimensions
from workbench.recipe import Recipe
from workbench.units import MIB

TINY = Recipe().with_changes(
    {
        "model.name_or_path": "tiny-llama",
        "data.max_length": 512,
        "evaluation.split": "none",
        "training.per_device_train_batch_size": 8,
        "training.gradient_accumulation_steps": 1,
    }
)
# With a small context, whose uncertainty would else be larger than all of so small a run.
T4 = dataclasses.replace(find_device("Tesla T4"), context_bytes=8 * MIB)
# The 8 samples at once take more, two by two less.
SMALL = dataclasses.replace(T4, capacity_bytes=220 * MIB)
ALL_BUT_SPLIT = frozenset({"training.activation_storage", "training.optim", "hardware.expandable_segments"}) | {
    "training.loss_type",
    "quantization.load_in_4bit",
    "training.gradient_checkpointing",
}


def option(mib: int, step_s: float, verdict: str = "fits", alters: tuple[str, ...] = ()) -> PlanOption:
    return PlanOption({}, mib * MIB, step_s, verdict, alters)  # type: ignore[arg-type]  # a literal


def test_padding_to_max_length_is_left_for_the_rows_real_lengths() -> None:
    padded = TINY.with_changes({"data.padding": "max_length"})
    raw = np.array([60] * 40)
    shape = dataclasses.replace(shape_of_lengths(padded, raw), raw_lengths=raw)
    quick_host = dataclasses.replace(T4, overhead_s=dict.fromkeys(("forward", "backward", "optimizer"), 1e-8))
    front = find_settings(padded, quick_host, shape=shape, pinned=ALL_BUT_SPLIT, freedom="nothing")
    fastest = front.options[0]
    assert fastest.changes["data.padding"] == "longest"
    assert fastest.step_s < 0.5 * front.current.step_s


def test_the_front_is_what_trying_everything_finds() -> None:
    pinned = ALL_BUT_SPLIT - {"training.loss_type", "hardware.expandable_segments"}
    front = find_settings(TINY, SMALL, pinned=pinned, freedom="nothing")
    assert front.is_complete
    space = dimensions(TINY, SMALL, pinned, "nothing")
    everything = []
    for choices in itertools.product(*(dimension.choices for dimension in space)):
        changes = {path: value for choice in choices for path, value in choice.changes.items()}
        estimate = estimate_run(TINY.with_changes(changes), SMALL)
        everything.append(
            PlanOption(changes, estimate.memory.process_bytes, estimate.time.step_s, estimate.memory.verdict)
        )
    fitting = [one for one in everything if one.verdict != "does_not_fit"]
    assert 1 < len(fitting) < len(everything)
    for one in fitting:
        assert any(beats(found, one, 2 * NOTABLE) for found in front.options), one
    for one, other in itertools.permutations(front.options, 2):
        assert not beats(one, other)
    assert [one.step_s for one in front.options] == sorted(one.step_s for one in front.options)


def test_every_setting_keeps_the_effective_batch_the_method_and_what_is_pinned() -> None:
    front = find_settings(TINY, SMALL, pinned={"training.loss_type"}, budget=25)
    assert front.options
    assert front.num_estimates <= 25
    assert not front.is_complete
    assert front.effective_batch_size == 8
    for one in front.options:
        changed = TINY.with_changes(one.changes)
        assert changed.training.effective_batch_size == 8
        assert changed.adapter.method == "lora"
        assert changed.training.loss_type == TINY.training.loss_type
        assert ("quantization.load_in_4bit" in one.changes) == any("4 bits" in words for words in one.alters)


def test_beats_looks_at_certainty_and_what_is_altered() -> None:
    assert beats(option(10, 1.0), option(11, 1.0))
    assert not beats(option(10, 1.1), option(11, 1.0))
    assert beats(option(10, 1.005), option(11, 1.0), NOTABLE)
    assert not beats(option(10, 1.0, "tight"), option(11, 1.0))
    assert not beats(option(10, 1.0, alters=("4 bits",)), option(11, 1.0))
    assert beats(option(10, 1.0), option(11, 1.0, alters=("4 bits",)))


def test_freedom_decides_what_may_be_altered() -> None:
    full = Recipe().with_changes({"adapter.method": "none"})
    touched = {
        freedom: {
            path for one in dimensions(full, T4, (), freedom) for choice in one.choices for path in choice.changes
        }
        for freedom in ("nothing", "numerics", "method")
    }
    exact = [choice for one in dimensions(full, T4, (), "nothing") for choice in one.choices]
    assert not any(choice.alters for choice in exact)
    assert "adapter.method" not in touched["numerics"]
    assert "adapter.method" in touched["method"]
    assert not {"adapter.method"} & touched["nothing"]


def test_what_a_person_set_is_pinned_but_for_the_split() -> None:
    changed = Recipe().with_changes({"training.loss_type": "chunked_nll", SPLIT_FIELDS[0]: 8})
    assert explicit_fields(changed) == {"training.loss_type"}
    front = find_settings(changed.with_changes({"model.name_or_path": "tiny-llama"}), SMALL, budget=3)
    assert set(front.pinned) == {"training.loss_type", "model.name_or_path"}


def test_make_fit_changes_no_more_than_is_needed() -> None:
    before = estimate_run(TINY, SMALL).memory.verdict
    assert before == "does_not_fit"
    fitting = make_fit(TINY, SMALL, pinned=ALL_BUT_SPLIT)
    assert fitting.verdict == "fits"
    assert set(fitting.changes) == set(SPLIT_FIELDS)
    estimate = estimate_run(TINY.with_changes(fitting.changes), SMALL)
    assert estimate.memory.verdict == "fits"
    assert estimate.memory.process_bytes == fitting.process_bytes


def test_make_fit_says_when_nothing_fits() -> None:
    tiny_device = dataclasses.replace(T4, capacity_bytes=40 * MIB)
    with pytest.raises(NothingFitsError, match=r"None of \d+ settings fits on Tesla T4 \(40 MiB\) with 8 samples"):
        make_fit(TINY, tiny_device, pinned=ALL_BUT_SPLIT, budget=8)


def test_progress_and_cancel() -> None:
    cancel = Cancel()
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        cancel.set()

    with pytest.raises(Cancelled):
        find_settings(TINY, SMALL, progress=stop, cancel=cancel)
    assert len(seen) == 1
    assert seen[0].total is not None
