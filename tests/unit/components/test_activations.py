"""Saved activations: exact where they are moved, close where they are compressed, and really smaller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench.components.activations import Compressed, block_size, host_mover
from workbench.components.model import build_model, resolve_precision
from workbench.components.source import find_source
from workbench.components.step import micro_step
from workbench.errors import RecipeError
from workbench.hardware import Device
from workbench.recipe import Recipe, find_problems

CPU = Device(name="CPU", kind="cpu", capacity_bytes=2**34, flops_per_s={"float32": 1e11}, bandwidth_bytes_per_s=1e10)
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128,
}  # fmt: skip
BASE = {"model.config": CONFIG, "adapter.method": "none"}


def gradients(changes: dict[str, Any]) -> dict[str, Tensor]:
    """Return the gradients of one micro-step."""
    recipe = Recipe().with_changes(BASE | changes)
    torch.manual_seed(0)
    model = build_model(recipe, find_source(recipe, for_training=False), CPU, place="cpu", allow_random_weights=True)
    ids = torch.arange(96).reshape(2, 48) % 64
    micro_step(recipe, model, {"input_ids": ids, "labels": ids}, None, resolve_precision(recipe, CPU))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("storage", ["8bit", "4bit"])
def test_a_mask_of_padding_is_kept_as_it_is(storage: str) -> None:
    """Fused attention saves it as floats with -inf, whose block would come back as NaN."""
    recipe = Recipe().with_changes(BASE | {"training.activation_storage": storage})
    model = build_model(recipe, find_source(recipe, for_training=False), CPU, place="cpu", allow_random_weights=True)
    ids, mask = torch.arange(96).reshape(2, 48) % 64, torch.ones(2, 48, dtype=torch.int64)
    mask[1, 30:] = 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    micro_step(recipe, model, batch, None, resolve_precision(recipe, CPU))
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def relative_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    squared = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return (squared / sum(float(value.square().sum()) for value in exact.values())) ** 0.5


@pytest.fixture(scope="module")
def exact() -> dict[str, Tensor]:
    return gradients({})


@pytest.mark.parametrize(("bits", "limit"), [(8, 1 / 254), (4, 1 / 14)])
def test_a_compressed_tensor_is_off_by_half_a_level_at_most(bits: int, limit: float) -> None:
    tensor = torch.randn(6, 320, generator=torch.Generator().manual_seed(1))
    packed = Compressed(tensor, bits)
    blocks = tensor.reshape(-1, block_size(tensor.numel(), bits))
    allowed = blocks.abs().amax(dim=1, keepdim=True) * limit * 1.001
    assert ((packed.restore().reshape(blocks.shape) - blocks).abs() <= allowed).all()
    num_bytes = packed._codes.numel() + 4 * packed._scales.numel()
    assert num_bytes <= tensor.numel() * bits / 8 * 1.13


def test_zeros_and_16_bit_tensors_come_back_in_their_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        restored = Compressed(torch.zeros(8, 128, dtype=dtype), 4).restore()
        assert restored.dtype == dtype and not restored.any()


def test_offload_changes_no_gradient(exact: dict[str, Tensor]) -> None:
    moved: list[int] = []

    def mover(tensor: Tensor) -> Callable[[], Tensor]:
        moved.append(tensor.numel())
        copy = tensor.clone()
        return lambda: copy

    with host_mover(mover):
        found = gradients({"training.activation_storage": "offload"})
    assert moved
    assert all(torch.equal(found[name], exact[name]) for name in exact)


@pytest.mark.parametrize(("storage", "limit"), [("8bit", 0.02), ("4bit", 0.3)])
def test_compression_costs_a_small_error_of_the_gradient(storage: str, limit: float, exact: dict[str, Tensor]) -> None:
    assert 0 < relative_error(gradients({"training.activation_storage": storage}), exact) < limit


def test_fewer_layers_mean_a_smaller_error(exact: dict[str, Tensor]) -> None:
    every = relative_error(gradients({"training.activation_storage": "4bit"}), exact)
    one = {"training.activation_storage": "4bit", "training.activation_storage_layers": [3]}
    assert 0 < relative_error(gradients(one), exact) < every


def test_of_a_checkpointed_layer_only_the_input_is_stored(exact: dict[str, Tensor]) -> None:
    moved: list[tuple[int, ...]] = []

    def mover(tensor: Tensor) -> Callable[[], Tensor]:
        moved.append(tuple(tensor.shape))
        copy = tensor.clone()
        return lambda: copy

    with host_mover(mover):
        found = gradients({"training.activation_storage": "offload", "training.gradient_checkpointing": True})
    assert moved == 4 * [(2, 48, 64)]
    assert all(torch.allclose(found[name], exact[name]) for name in exact)


@pytest.mark.parametrize(
    ("changes", "checkpointed"),
    [
        ({}, [0, 1, 2, 3]),
        ({"training.gradient_checkpointing_every": 2}, [0, 2]),
        ({"training.gradient_checkpointing_keep_first": 3}, [3]),
        ({"training.gradient_checkpointing_keep_first": 1, "training.gradient_checkpointing_every": 2}, [1, 3]),
    ],
)
def test_only_the_chosen_layers_are_computed_again(
    changes: dict[str, Any], checkpointed: list[int], exact: dict[str, Tensor]
) -> None:
    recipe = Recipe().with_changes(BASE | {"training.gradient_checkpointing": True} | changes)
    torch.manual_seed(0)
    model: Any = build_model(
        recipe, find_source(recipe, for_training=False), CPU, place="cpu", allow_random_weights=True
    )
    runs = [0, 0, 0, 0]
    for index, layer in enumerate(model.model.layers):

        def count(module: nn.Module, inputs: Any, index: int = index) -> None:
            runs[index] += 1

        layer.mlp.register_forward_pre_hook(count)
    ids = torch.arange(96).reshape(2, 48) % 64
    micro_step(recipe, model, {"input_ids": ids, "labels": ids}, None, resolve_precision(recipe, CPU))
    assert [index for index, number in enumerate(runs) if number == 2] == checkpointed
    assert all(torch.allclose(p.grad, exact[name]) for name, p in model.named_parameters())


def test_a_layer_that_does_not_exist_is_named() -> None:
    changes = {"training.activation_storage": "8bit", "training.activation_storage_layers": [4]}
    with pytest.raises(RecipeError, match=r"layer 4 does not exist; this model has layers 0 to 3"):
        gradients(changes)


def test_settings_without_effect_are_refused() -> None:
    recipe = Recipe().with_changes({"training.gradient_checkpointing_every": 2})
    assert [problem.field for problem in find_problems(recipe)] == ["training.gradient_checkpointing_every"]
    recipe = Recipe().with_changes({"training.activation_storage": "offload"})
    assert [problem.field for problem in find_problems(recipe, CPU.facts(for_estimate=True))] == [
        "training.activation_storage"
    ]
