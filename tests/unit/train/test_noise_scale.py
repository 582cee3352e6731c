"""The noise scale is measured right, moves the batch within its bounds, and survives a resume."""

from __future__ import annotations

import pytest
import torch

from workbench.recipe import Recipe, find_problems
from workbench.train import noise_scale
from workbench.train.noise_scale import NoiseScale

from .parts import small_recipe

SETTINGS = {"policies__batch": "noise_scale", "policies__max_accumulation": 8, "evaluation__split": "none"}


def scale_of(accumulation: int = 4) -> NoiseScale:
    changes = {"policies.batch": "noise_scale", "training.gradient_accumulation_steps": accumulation}
    return NoiseScale(Recipe().with_changes(changes))


def measure(scale: NoiseScale, noise: float, num_steps: int, tokens: int = 10) -> None:
    """Feed gradients of known signal (squared norm 1) and noise (trace of the covariance of one token)."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        passes = scale.num_micro_batches
        true = torch.ones(400) / 20
        micro = true + torch.randn(passes, 400, generator=draw) * (noise / 400 / tokens) ** 0.5
        first, whole = float(micro[0].square().sum()), float(micro.mean(0).square().sum())
        scale.record((first, tokens), (whole, tokens * passes), passes)


@pytest.mark.parametrize("noise", [20.0, 200.0])
def test_it_is_noise_by_signal_in_tokens(noise: float) -> None:
    scale = scale_of()
    measure(scale, noise, 50)
    assert scale.tokens == pytest.approx(noise, rel=0.15)


def test_nothing_changes_before_enough_is_measured() -> None:
    scale = scale_of()
    measure(scale, 1000.0, noise_scale.CHANGE_EVERY_STEPS - 1)
    assert scale.tokens is None and scale.change() is None


@pytest.mark.parametrize(("noise", "expected"), [(1000.0, [8, 16, 32]), (1.0, [2]), (40.0, [])])
def test_the_batch_follows_within_bounds_by_at_most_a_factor_of_two(noise: float, expected: list[int]) -> None:
    scale, seen = scale_of(4), []
    for _ in range(5):
        measure(scale, noise, noise_scale.CHANGE_EVERY_STEPS)
        changed = scale.change()
        if changed is not None:
            seen.append(changed)
    assert seen == expected


def test_noise_that_hides_the_gradient_lets_the_batch_grow() -> None:
    scale = scale_of()
    for _ in range(noise_scale.CHANGE_EVERY_STEPS):
        scale.record((10.0, 10), (1.0, 40), 4)
    assert scale.tokens == float("inf") and scale.change() == 8


def test_a_run_changes_its_batch_and_resumes_to_the_bit(tiny, monkeypatch) -> None:
    """22 samples in micro-batches of 2: steps of 2 to 8 of them run over the ends of epochs."""
    monkeypatch.setattr(noise_scale, "CHANGE_EVERY_STEPS", 3)
    recipe = small_recipe(training__max_steps=14, training__save_steps=5, training__save_total_limit=None, **SETTINGS)
    whole = tiny(recipe).start().wait(60)
    steps = whole.log.of("step")
    assert [step["step"] for step in steps] == list(range(1, 15))
    sizes = [step["accumulation"] for step in steps]
    changes = whole.log.of("batch")
    assert len(set(sizes)) > 1 and all(2 <= size <= 8 for size in sizes)
    assert [one["gradient_accumulation_steps"] for one in changes]
    assert all("tokens" in one["message"] for one in changes)
    assert steps[3]["noise_scale_tokens"] > 0
    epochs = [step["epoch"] for step in steps]
    assert epochs == sorted(epochs) and epochs[-1] > 2
    resumed = tiny(recipe, run_dir="other", resume_from=whole.run_dir / "checkpoints" / "step-000005")
    resumed.start().wait(60)
    again = resumed.log.of("step")
    assert [step["step"] for step in again] == list(range(6, 15))
    for before, after in zip(steps[5:], again, strict=True):
        for name in ("loss", "grad_norm", "accumulation", "epoch", "num_tokens"):
            assert after[name] == before[name], (after["step"], name)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"policies.batch": "noise_scale"}, "training.max_steps"),
        ({"policies.batch": "noise_scale", "training.max_steps": 9, "policies.max_accumulation": 3},
         "training.gradient_accumulation_steps"),
        ({"policies.batch": "noise_scale", "training.max_steps": 9, "policies.min_accumulation": 40},
         "policies.min_accumulation"),
        ({"policies.batch": "noise_scale", "training.max_steps": 9, "sharding.num_processes": 2}, "policies.batch"),
        ({"policies.max_accumulation": 3}, "policies.max_accumulation"),
    ],
)  # fmt: skip
def test_wrong_combinations_are_refused(changes: dict[str, object], field: str) -> None:
    recipe = Recipe().with_changes(changes)
    problem = next(one for one in find_problems(recipe) if one.field == field)
    assert field not in {one.field for one in find_problems(recipe.with_changes(dict(problem.fix)))}
