from __future__ import annotations

import dataclasses

import pytest

from workbench.errors import Cancelled
from workbench.estimate import estimate_run
from workbench.events import Cancel, Progress
from workbench.hardware import find_device
from workbench.plan import other_values, plan_run
from workbench.recipe import Recipe, field_info, find_problems, iter_fields

T4 = find_device("Tesla T4")
TINY = Recipe().with_changes({"model.name_or_path": "tiny-llama", "data.max_length": 64})


@pytest.fixture(scope="module")
def plan() -> object:
    return plan_run(TINY, T4)


def test_every_toggle_has_an_effect_that_an_estimate_confirms(plan: object) -> None:
    effects = plan.effects  # type: ignore[attr-defined]  # a Plan
    toggles = [info for info in iter_fields() if info.toggle]
    allowed = {info.path for info in toggles if any(_is_allowed(info.path, v) for v in other_values(info, TINY))}
    assert "training.gradient_checkpointing_every" not in allowed  # it says which layers, and checkpointing is off
    assert {effect.field for effect in effects} == allowed
    assert len(allowed) >= 25
    chosen = next(effect for effect in effects if effect.field == "training.gradient_checkpointing")
    base, changed = (estimate_run(TINY.with_changes(change), T4) for change in ({}, {chosen.field: chosen.value}))
    assert chosen.memory_delta_bytes == changed.memory.process_bytes - base.memory.process_bytes
    assert chosen.step_delta_s == pytest.approx(changed.time.step_s - base.time.step_s)
    assert chosen.verdict == changed.memory.verdict


def _is_allowed(path: str, value: object) -> bool:
    return not find_problems(TINY.with_changes({path: value}), T4.facts(for_estimate=True))


def test_forbidden_values_are_left_out(plan: object) -> None:
    values = {(effect.field, effect.value) for effect in plan.effects}  # type: ignore[attr-defined]  # a Plan
    assert ("training.mixed_precision", "bf16") not in values  # a T4 does not compute it
    assert ("model.attn_implementation", "flash_attention_2") not in values


def test_a_run_that_fits_needs_no_options(plan: object) -> None:
    assert plan.verdict == "fits"  # type: ignore[attr-defined]  # a Plan
    assert plan.options == ()  # type: ignore[attr-defined]  # a Plan


def test_options_fit_and_keep_the_effective_batch() -> None:
    recipe = Recipe().with_changes(
        {"data.max_length": 2048, "training.per_device_train_batch_size": 8, "training.gradient_accumulation_steps": 2}
    )
    small = dataclasses.replace(T4, capacity_bytes=6 * 2**30)
    plan = plan_run(recipe, small)
    assert plan.verdict == "does_not_fit"
    assert plan.options
    for option in plan.options:
        changed = recipe.with_changes(option.changes)
        assert changed.training.effective_batch_size == recipe.training.effective_batch_size
        estimate = estimate_run(changed, small)
        assert estimate.memory.verdict == option.verdict != "does_not_fit"
        assert estimate.memory.process_bytes == option.process_bytes


def test_other_values() -> None:
    assert other_values(field_info("data.packing"), TINY) == [True]
    assert other_values(field_info("adapter.r"), TINY) == [8, 32]
    assert other_values(field_info("training.mixed_precision"), TINY) == ["no", "bf16", "fp16"]
    single = TINY.with_changes({"training.per_device_train_batch_size": 1})
    assert other_values(field_info("training.per_device_train_batch_size"), single) == [2]


def test_progress_and_cancel() -> None:
    seen: list[Progress] = []
    cancel = Cancel()

    def stop_soon(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 2:
            cancel.set()

    with pytest.raises(Cancelled):
        plan_run(TINY, T4, progress=stop_soon, cancel=cancel)
    assert [item.stage for item in seen] == ["plan", "plan"]
