"""Freezing and phases: exactly the chosen parameters train, and each phase has its own rate and layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from workbench.components.freezing import PhaseSwitch, phase_at, phase_recipes
from workbench.components.model import build_model
from workbench.components.optimizer import build_optimizer, build_schedule
from workbench.components.source import find_source
from workbench.errors import RecipeError
from workbench.estimate import estimate_run
from workbench.hardware import Device, find_device
from workbench.recipe import Recipe, find_problems

CPU = Device(name="CPU", kind="cpu", capacity_bytes=2**34, flops_per_s={"float32": 1e11}, bandwidth_bytes_per_s=1e10)
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128,
}  # fmt: skip


def recipe_of(changes: dict[str, Any]) -> Recipe:
    return Recipe().with_changes({"model.config": CONFIG} | changes)


def build(changes: dict[str, Any], place: str = "meta") -> nn.Module:
    recipe = recipe_of(changes)
    source = find_source(recipe, for_training=False)
    return build_model(recipe, source, CPU, place=place, allow_random_weights=True)


def training_layers(model: nn.Module) -> set[str]:
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name.split("layers.")[1].split(".")[0] if "layers." in name else name for name in names}


def test_only_the_last_layers_train() -> None:
    assert training_layers(build({"adapter.method": "none", "adapter.trainable_layers": 2})) == {"2", "3"}
    assert training_layers(build({"adapter.trainable_layers": 1})) == {"3"}


def test_only_named_modules_train_and_only_in_those_layers() -> None:
    model = build(
        {"adapter.method": "none", "adapter.trainable_modules": ["self_attn", "lm_head"], "adapter.trainable_layers": 1}
    )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "lm_head.weight" in trained
    assert all("layers.3.self_attn" in name for name in trained - {"lm_head.weight"}) and len(trained) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adapter.trainable_layers": 9}, "9 is more than the model's 4 layers"),
        ({"adapter.method": "none", "adapter.trainable_modules": ["attn"]}, "attn is no module of this model"),
    ],
)
def test_what_does_not_exist_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build(changes)


def test_fewer_layers_that_train_take_less_memory_in_the_estimate() -> None:
    device = find_device("Tesla T4")
    changes = {"adapter.method": "none", "evaluation.split": "none", "training.per_device_train_batch_size": 1}
    peaks = [
        estimate_run(recipe_of(changes | {"adapter.trainable_layers": count}), device).memory for count in (None, 2, 1)
    ]
    assert peaks[0].peak_allocated_bytes > peaks[1].peak_allocated_bytes > peaks[2].peak_allocated_bytes


PHASES = {
    "phases.steps": [2, 3], "phases.learning_rate": [1e-2, 1e-3], "phases.trainable_layers": [1, 3],
    "adapter.method": "none",
}  # fmt: skip


def test_phases_switch_parameters_on_and_off() -> None:
    model, recipe = build(PHASES), recipe_of(PHASES)
    switch = PhaseSwitch(recipe, model)
    assert switch.apply(0) == 0 and switch.apply(1) is None
    # What lies outside the layers trains in every phase.
    outside = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert training_layers(model) == {"3"} | outside
    assert switch.apply(2) == 1
    assert training_layers(model) == {"1", "2", "3"} | outside


def test_state_is_kept_for_parameters_that_train_again_and_dropped_for_the_others() -> None:
    changes = PHASES | {"phases.steps": [1, 1, 1], "phases.learning_rate": [], "phases.trainable_layers": [4, 1, 3]}
    model: Any = build(changes, place="cpu")
    recipe = recipe_of(changes)
    optimizer = build_optimizer(recipe, model)
    switch = PhaseSwitch(recipe, model)
    switch.apply(0, optimizer)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    layers = model.model.layers
    switch.apply(1, optimizer)
    assert layers[0].mlp.up_proj.weight not in optimizer.state  # trains never again
    assert layers[1].mlp.up_proj.weight in optimizer.state  # trains again in phase 3
    assert layers[1].mlp.up_proj.weight.grad is None


def test_each_phase_has_its_own_schedule() -> None:
    recipe = recipe_of(PHASES | {"training.lr_scheduler_type": "linear"})
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.training.learning_rate)
    schedule = build_schedule(recipe, optimizer, 5)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([1e-2, 5e-3, 1e-3, 2e-3 / 3, 1e-3 / 3])


@pytest.mark.parametrize("name", ["linear", "cosine", "constant", "constant_with_warmup"])
def test_one_phase_has_the_schedule_of_a_run_without_phases(name: str) -> None:
    changes = {"training.lr_scheduler_type": name, "training.warmup_steps": 0 if name == "constant" else 3}
    rates: list[list[float]] = []
    for phases in ({}, {"phases.steps": [10]}):
        recipe = recipe_of(changes | phases)
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=recipe.training.learning_rate)
        schedule = build_schedule(recipe, optimizer, 10)
        rates.append([])
        for _ in range(10):
            rates[-1].append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
    assert rates[0] == pytest.approx(rates[1])


def test_steps_belong_to_phases() -> None:
    recipe = recipe_of(PHASES)
    assert [phase_at(recipe, step) for step in range(6)] == [0, 0, 1, 1, 1, 1]
    assert [(one.phases.trainable_layers, steps) for one, steps in phase_recipes(recipe)] == [((1,), 2), ((3,), 3)]


def test_the_estimate_is_that_of_the_largest_phase_and_of_all_steps() -> None:
    device = find_device("Tesla T4")
    whole = estimate_run(recipe_of(PHASES), device)
    parts = [estimate_run(one, device) for one, _ in phase_recipes(recipe_of(PHASES))]
    assert whole.memory.process_bytes == max(part.memory.process_bytes for part in parts)
    assert whole.time.total_s == pytest.approx(2 * parts[0].time.step_s + 3 * parts[1].time.step_s)
    assert whole.time.num_steps == 5 and parts[0].num_trainable_parameters < parts[1].num_trainable_parameters


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"phases.steps": [2, 0]}, "phases.steps"),
        ({"phases.steps": [2], "phases.learning_rate": [1e-3, 1e-4]}, "phases.learning_rate"),
        ({"phases.trainable_layers": [1]}, "phases.trainable_layers"),
        ({"phases.steps": [2, 3], "training.max_steps": 4}, "training.max_steps"),
        ({"adapter.trainable_modules": ["lm_head"]}, "adapter.trainable_modules"),
        ({"adapter.trainable_layers": 2, "adapter.layers_to_transform": [1]}, "adapter.layers_to_transform"),
    ],
)
def test_contradictions_name_the_field(changes: dict[str, Any], field: str) -> None:
    assert [problem.field for problem in find_problems(Recipe().with_changes(changes))] == [field]
