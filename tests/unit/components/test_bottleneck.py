"""Bottleneck adapters begin as nothing, train alone, and come back from a folder onto a fresh base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.components.attaching import attach_own_adapter
from workbench.components.model import build_model
from workbench.components.own_adapter import read_own_adapter
from workbench.components.step import micro_step
from workbench.errors import ModelError
from workbench.train.checkpoint import save_weights

from .tiny import CPU, batch_of, recipe_with, tiny_source

PLAIN = {"adapter.method": "bottleneck", "adapter.bottleneck_size": 8}


def build(folder: Path, changes: dict[str, Any] | None = None, **config: Any) -> Any:
    source: Any = tiny_source(folder, **config)
    return build_model(recipe_with({**PLAIN, **(changes or {})}), source, CPU, place="cpu")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=batch_of()["input_ids"]).logits
    return found


def trained(folder: Path, changes: dict[str, Any] | None = None, **config: Any) -> Any:
    """Return a model whose bottlenecks no longer do nothing."""
    model = build(folder, changes, **config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_it_starts_as_the_base_and_has_two_small_networks_a_layer(tmp_path: Path) -> None:
    plain = build(tmp_path, {"adapter.method": "none", "adapter.bottleneck_size": 64})
    model = build(tmp_path)
    assert torch.equal(logits(model), logits(plain))
    trains = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert all(".bottleneck." in name for name in trains)
    # 2 layers x 2 places x (64 to 8 and back, with biases)
    assert sum(one.numel() for one in trains.values()) == 2 * 2 * (2 * 64 * 8 + 8 + 64)


def test_attention_and_feed_forward_learn_in_the_first_step(tmp_path: Path) -> None:
    model, recipe = build(tmp_path), recipe_with(PLAIN)
    from workbench.components.precision import resolve_precision

    micro_step(recipe, model, batch_of(), 10, resolve_precision(recipe, CPU))
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            assert float(part.bottleneck.up.weight.grad.norm()) > 0
    assert all(one.grad is None for name, one in model.named_parameters() if ".bottleneck." not in name)


@pytest.mark.parametrize("changes", [{"adapter.layers_to_transform": [1]}, {"adapter.trainable_layers": 1}])
def test_only_chosen_layers_get_some(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = build(tmp_path, changes)
    assert not hasattr(model.model.layers[0].mlp, "bottleneck") and hasattr(model.model.layers[1].mlp, "bottleneck")


def test_it_is_computed_in_float32_beside_a_16_bit_base_unless_asked_otherwise(tmp_path: Path) -> None:
    changes = {"model.dtype": "bfloat16"}
    model = trained(tmp_path, changes)
    assert model.model.layers[0].mlp.bottleneck.up.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert logits(model).dtype == torch.bfloat16
    half = build(tmp_path, {**changes, "adapter.autocast_adapter_dtype": False})
    assert half.model.layers[0].mlp.bottleneck.up.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("changes", [{}, {"adapter.layers_to_transform": [1], "adapter.modules_to_save": ["lm_head"]}])
def test_saved_it_comes_back_onto_a_fresh_base(tmp_path: Path, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = trained(tmp_path / "base", changes)
    (tmp_path / "saved").mkdir()
    save_weights(model, tmp_path / "saved")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = logits(base)
    attach_own_adapter(base, tmp_path / "saved")
    assert torch.equal(logits(base), logits(model)) and not torch.equal(logits(base), before)


def test_another_base_and_a_torn_file_are_refused_in_words(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    (tmp_path / "saved").mkdir()
    save_weights(trained(tmp_path / "base"), tmp_path / "saved")
    build(tmp_path / "other", hidden_size=32)
    with pytest.raises(ModelError, match=r"do not fit, such as model\.layers\.0\.mlp\.bottleneck"):
        attach_own_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "other"), tmp_path / "saved")
    (tmp_path / "saved" / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="no adapter of the workbench that can be read"):
        read_own_adapter(tmp_path / "saved")
