"""Weights go out and come back, and what reads back differently is noticed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.components.model import build_model
from workbench.errors import RunError
from workbench.train.checkpoint import load_weights, random_state, save_weights

from ..components.tiny import CPU, recipe_with, tiny_source


def _model(folder, **changes):
    source = tiny_source(folder, tie_word_embeddings=changes.pop("tied", False))
    model = build_model(recipe_with(changes), source, CPU, place="cpu")
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"adapter.modules_to_save": ("lm_head",)},
        {"adapter.use_dora": True},
        {"adapter.target_modules": ("q_proj", "embed_tokens")},
        {"adapter.autocast_adapter_dtype": False, "model.dtype": "bfloat16"},
        {"adapter.method": "none"},
        {"quantization.load_in_8bit": True},
    ],
)
def test_weights_come_back_into_the_same_parameters(tmp_path, changes, tied):
    model = _model(tmp_path / "model", tied=tied, **changes)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    (tmp_path / "saved").mkdir()
    save_weights(model, tmp_path / "saved")
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.zeros_(parameter)
    load_weights(model, tmp_path / "saved")
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == identities
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, before[name]), name
    assert {path.suffix for path in (tmp_path / "saved").iterdir()} <= {".safetensors", ".json", ".md", ".jinja"}


def test_a_base_without_its_head_or_of_another_shape_is_refused(tmp_path):
    model = _model(tmp_path / "model", **{"adapter.method": "none"})
    (tmp_path / "saved").mkdir()
    save_weights(model, tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path)
    with pytest.raises(RunError, match=r"another model or adapter .*lm_head\.weight"):
        load_weights(model, tmp_path / "saved")


@pytest.mark.parametrize("method", ["lora", "none"])
def test_files_that_read_back_differently_are_noticed(tmp_path, monkeypatch, method):
    model = _model(tmp_path / "model", **{"adapter.method": method})
    (tmp_path / "saved").mkdir()
    original = type(model).save_pretrained

    def damaged(self, folder, **options):
        original(self, folder, **options)
        path = next(folder.glob("*.safetensors"))
        tensors = load_file(path)
        name = sorted(tensors)[0]
        if method == "lora":
            tensors[name] = tensors[name] + 1
        else:
            tensors[name] = tensors[name][:1].clone()
        save_file(tensors, path, metadata={"format": "pt"})

    monkeypatch.setattr(type(model), "save_pretrained", damaged)
    with pytest.raises(RunError, match="1 tensors read back differently"):
        save_weights(model, tmp_path / "saved")


def test_saving_asks_no_hub(tmp_path, monkeypatch):
    import socket

    model = _model(tmp_path / "model", **{"adapter.target_modules": ("q_proj", "embed_tokens", "lm_head")})
    (tmp_path / "saved").mkdir()

    def refuse(*args, **kwargs):
        raise AssertionError("a network call")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    save_weights(model, tmp_path / "saved")


def test_random_state_is_restored_by_its_parts():
    state = random_state()
    first = torch.rand(3)
    torch.random.set_rng_state(state["cpu"])
    assert torch.equal(torch.rand(3), first)
