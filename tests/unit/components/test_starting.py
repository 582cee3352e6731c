"""A run can start from an adapter: its shape takes over, its weights are there, what contradicts it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.components.model import build_model
from workbench.components.starting import start_notes, starting_recipe
from workbench.errors import ModelError, RecipeError
from workbench.estimate import estimate_run
from workbench.hardware import find_device
from workbench.train.checkpoint import save_weights

from .tiny import CPU, batch_of, recipe_with, tiny_config, tiny_source

SHAPES: dict[str, dict[str, Any]] = {
    "lora": {"adapter.r": 4, "adapter.lora_alpha": 12, "adapter.target_modules": ["q_proj", "down_proj"]},
    "rslora on one layer": {"adapter.r": 2, "adapter.use_rslora": True, "adapter.layers_to_transform": [1]},
    "bottleneck": {"adapter.method": "bottleneck", "adapter.bottleneck_size": 6},
}


def build(folder: Path, changes: dict[str, Any], **config: Any) -> Any:
    source: Any = tiny_source(folder, **config)
    return build_model(recipe_with(changes), source, CPU, place="cpu")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=batch_of()["input_ids"]).logits
    return found


def saved(folder: Path, changes: dict[str, Any]) -> Any:
    model = build(folder / "base", changes)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    (folder / "run" / "adapter").mkdir(parents=True)
    save_weights(model, folder / "run" / "adapter")
    return model


def start(folder: Path, changes: dict[str, Any] | None = None, method: str = "lora") -> dict[str, Any]:
    return {"adapter.name_or_path": str(folder / "run"), "adapter.method": method, **(changes or {})}


@pytest.mark.parametrize("shape", SHAPES)
def test_it_starts_where_the_other_run_ended_with_the_same_parts_trainable(tmp_path: Path, shape: str) -> None:
    first = saved(tmp_path, SHAPES[shape])
    changes = start(tmp_path, method=SHAPES[shape].get("adapter.method", "lora"))
    model = build(tmp_path / "base", changes)
    assert torch.equal(logits(model), logits(first))
    trains = [{name for name, one in each.named_parameters() if one.requires_grad} for each in (first, model)]
    assert trains[0] == trains[1]
    found = starting_recipe(recipe_with(changes))
    for path, value in SHAPES[shape].items():
        assert found.get(path) == (tuple(sorted(value)) if isinstance(value, list) else value)
    assert str(tmp_path / "run") in start_notes(recipe_with(changes))[0]


def test_the_estimate_counts_the_shape_of_that_adapter(tmp_path: Path) -> None:
    first = saved(tmp_path, SHAPES["lora"])
    recipe = recipe_with({**start(tmp_path), "model.config": {**tiny_config().to_dict(), "dtype": "float32"}})
    estimate = estimate_run(recipe, find_device("Tesla T4"))
    assert estimate.num_trainable_parameters == sum(one.numel() for one in first.parameters() if one.requires_grad)
    assert any("Starts from the adapter in" in note for note in estimate.notes)


def test_a_contrary_choice_is_named_with_the_value_of_the_adapter(tmp_path: Path) -> None:
    saved(tmp_path, SHAPES["lora"])
    with pytest.raises(RecipeError) as caught:
        starting_recipe(recipe_with(start(tmp_path, {"adapter.r": 8, "adapter.use_dora": True})))
    assert [problem.field for problem in caught.value.problems] == ["adapter.r", "adapter.use_dora"]
    assert caught.value.problems[0].fix == (("adapter.r", 4),) and "which is 4" in str(caught.value)
    same = starting_recipe(recipe_with(start(tmp_path, {"adapter.target_modules": ["down_proj", "q_proj"]})))
    assert same.adapter.r == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "is of type IA3"),
        ({"rank_pattern": {"q_proj": 2}}, "uses rank_pattern"),
        (None, "holds no"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_loads(
    tmp_path: Path, change: dict[str, Any] | None, words: str
) -> None:
    saved(tmp_path, SHAPES["lora"])
    config = tmp_path / "run" / "adapter" / "adapter_config.json"
    if change is None:
        config.unlink()
    else:
        config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(RecipeError, match=words):
        starting_recipe(recipe_with(start(tmp_path)))


@pytest.mark.parametrize("method", ["lora", "bottleneck"])
def test_an_adapter_of_another_base_is_refused_in_words(tmp_path: Path, method: str) -> None:
    saved(tmp_path, SHAPES[method])
    with pytest.raises(ModelError, match=r"does not fit .* tensors differ, such as .*\(\d+, \d+\) needed"):
        build(tmp_path / "other", start(tmp_path, method=method), hidden_size=32)
