"""The constructor of models: places, dtypes, quantization, adapters, checkpointing."""

from __future__ import annotations

import warnings

import pytest
import torch

from workbench.components.adapter import count_parameters
from workbench.components.model import build_model, load_weight_dtype, resolve_precision
from workbench.components.optimizer import build_optimizer
from workbench.components.step import micro_step
from workbench.errors import Cancelled, ModelError, RecipeError
from workbench.events import Cancel

from .tiny import CPU, GPU, OLD_GPU, batch_of, recipe_with, tiny_source


def _step(recipe, model, **changes):
    loss = micro_step(recipe, model, batch_of(**changes), 10, resolve_precision(recipe, CPU))
    return float(loss)


@pytest.mark.parametrize(
    ("changes", "device", "autocast", "scaler"),
    [
        ({}, GPU, torch.bfloat16, False),
        ({}, OLD_GPU, torch.float16, True),
        ({}, CPU, None, False),
        ({"training.mixed_precision": "bf16"}, CPU, torch.bfloat16, False),
        ({"training.mixed_precision": "no"}, GPU, None, False),
        ({"training.mixed_precision": "fp16"}, GPU, torch.float16, True),
    ],
)
def test_precision_follows_the_device(changes, device, autocast, scaler):
    precision = resolve_precision(recipe_with(changes), device)
    assert (precision.autocast_dtype, precision.uses_grad_scaler) == (autocast, scaler)


@pytest.mark.parametrize(
    ("changes", "stored", "device", "expected"),
    [
        ({}, torch.bfloat16, GPU, torch.bfloat16),
        ({}, torch.float16, GPU, torch.float16),
        ({}, torch.float32, GPU, torch.float32),
        ({}, torch.bfloat16, OLD_GPU, torch.float16),
        ({}, torch.float16, CPU, torch.float32),
        ({"adapter.method": "none"}, torch.bfloat16, GPU, torch.float32),
        ({"adapter.method": "none", "model.dtype": "bfloat16"}, torch.bfloat16, GPU, torch.bfloat16),
        ({"model.dtype": "float16"}, torch.bfloat16, GPU, torch.float16),
    ],
)
def test_weight_dtype_rules(tmp_path, changes, stored, device, expected):
    source = tiny_source(tmp_path, has_weights=False, dtype=stored)
    assert load_weight_dtype(recipe_with(changes), source, device) is expected


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("kbit", [True, False])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_meta_model_has_the_modules_and_dtypes_of_the_real_one(tmp_path, bits, kbit, stored):
    changes = {"quantization.prepare_model_for_kbit_training": kbit, "model.dtype": str(stored).split(".")[1]}
    if bits:
        changes[f"quantization.load_in_{bits}bit"] = True
    recipe, source = recipe_with(changes), tiny_source(tmp_path)
    real = build_model(recipe, source, CPU, place="cpu")
    meta = build_model(recipe, source, CPU, place="meta")
    assert [(name, type(module)) for name, module in real.named_modules()] == [
        (name, type(module)) for name, module in meta.named_modules()
    ]

    def rows(model):
        return [(name, type(p), p.dtype, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]

    assert rows(real) == rows(meta)
    assert all(parameter.device.type == "meta" for parameter in meta.parameters())
    assert count_parameters(real) == count_parameters(meta)


def test_weights_that_a_model_makes_on_the_cpu_lie_on_meta_in_the_dtype_they_are_loaded_in(tmp_path):
    from transformers import XLNetConfig

    source = tiny_source(tmp_path, has_weights=False)
    source.config = XLNetConfig(vocab_size=64, d_model=32, n_layer=1, n_head=2, d_inner=32)
    changes = {"model.name_or_path": "xlnet", "adapter.method": "none", "model.dtype": "bfloat16"}
    model = build_model(recipe_with(changes), source, CPU, place="meta")
    found = {(parameter.device.type, parameter.dtype) for parameter in model.parameters()}
    assert found == {("meta", torch.bfloat16)}


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter.autocast_adapter_dtype": False, "model.dtype": "bfloat16"},
        {"adapter.use_dora": True},
        {"adapter.use_dora": True, "quantization.load_in_4bit": True},
        {"adapter.modules_to_save": ("lm_head",)},
        {"adapter.layers_to_transform": (1,)},
        {"adapter.method": "none"},
    ],
)
def test_adapter_kinds_are_the_same_on_meta(tmp_path, changes):
    recipe, source = recipe_with(changes), tiny_source(tmp_path)
    real = build_model(recipe, source, CPU, place="cpu")
    meta = build_model(recipe, source, CPU, place="meta")
    rows = [[(n, p.dtype, tuple(p.shape), p.requires_grad) for n, p in m.named_parameters()] for m in (real, meta)]
    assert rows[0] == rows[1]
    _step(recipe, real)
    trained = [name for name, parameter in real.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(parameter.grad is not None for parameter in real.parameters() if parameter.requires_grad)


def test_layers_to_transform_adapts_only_these_layers(tmp_path):
    model = build_model(recipe_with({"adapter.layers_to_transform": (1,)}), tiny_source(tmp_path), CPU, place="cpu")
    layers = {name.split(".layers.")[1][0] for name, p in model.named_parameters() if p.requires_grad}
    assert layers == {"1"}


@pytest.mark.parametrize("bits", [4, 8])
def test_skipped_modules_stay_whole_and_so_does_the_head(tmp_path, bits):
    changes = {
        f"quantization.load_in_{bits}bit": True,
        "quantization.llm_int8_skip_modules": ("down_proj",),
        "adapter.target_modules": ("q_proj",),
    }
    for place in ("cpu", "meta"):
        model = build_model(recipe_with(changes), tiny_source(tmp_path), CPU, place=place).get_base_model()
        assert type(model.lm_head) is torch.nn.Linear
        assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
        assert type(model.model.layers[0].mlp.up_proj) is not torch.nn.Linear


def test_fewer_layers_shorten_per_layer_lists_and_leave_the_source_alone(tmp_path):
    source = tiny_source(tmp_path, has_weights=False, layers=4)
    source.config.layer_types = ["full_attention"] * 4
    model = build_model(recipe_with({}), source, CPU, place="meta", num_hidden_layers=1)
    config = model.get_base_model().config
    assert (config.num_hidden_layers, len(config.layer_types)) == (1, 1)
    assert (source.config.num_hidden_layers, len(source.config.layer_types)) == (4, 4)


@pytest.mark.parametrize("changes", [{}, {"quantization.load_in_4bit": True}, {"adapter.method": "none"}])
def test_checkpointing_changes_no_gradient_and_warns_of_nothing(tmp_path, changes):
    source = tiny_source(tmp_path)
    gradients, losses = [], []
    for enabled in (False, True):
        recipe = recipe_with({**changes, "training.gradient_checkpointing": enabled})
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            warnings.simplefilter("error", UserWarning)
            model = build_model(recipe, source, CPU, place="cpu")
        layer = model.get_submodule(
            "base_model.model.model.layers.0" if not changes.get("adapter.method") else "model.layers.0"
        )
        assert layer.gradient_checkpointing is enabled
        calls = []
        layer.self_attn.register_forward_hook(lambda *args, calls=calls: calls.append(1))
        losses.append(_step(recipe, model))
        assert len(calls) == 1 + enabled  # The layer is computed again in backward, and only then.
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert losses[0] == losses[1]
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_frozen_layers_below_the_adapter_get_no_backward(tmp_path):
    recipe = recipe_with({"adapter.layers_to_transform": (1,), "training.gradient_checkpointing": True})
    model = build_model(recipe, tiny_source(tmp_path), CPU, place="cpu")
    seen = []
    model.get_base_model().model.layers[0].register_forward_hook(lambda m, a, out: seen.append(out.requires_grad))
    _step(recipe, model)
    assert seen == [False]


def test_wrong_targets_are_named_with_what_exists(tmp_path):
    source = tiny_source(tmp_path)
    changes = {"adapter.target_modules": ("q_proj", "qproj", "wqkv")}
    with pytest.raises(
        RecipeError, match=r"qproj, wqkv match no module.*down_proj, gate_proj, k_proj, lm_head"
    ) as info:
        build_model(recipe_with(changes), source, CPU, place="meta")
    assert [problem.field for problem in info.value.problems] == ["adapter.target_modules"]
    for wrong in (
        {"adapter.target_modules": "nothing.*"},
        {"adapter.modules_to_save": ("head",)},
        {"adapter.layers_to_transform": (0, 9)},
    ):
        with pytest.raises(RecipeError):
            build_model(recipe_with(wrong), source, CPU, place="meta")


def test_no_weights_and_broken_weights_are_one_sentence(tmp_path):
    with pytest.raises(ModelError, match="estimated, not trained"):
        build_model(recipe_with({}), tiny_source(tmp_path / "a", has_weights=False), CPU, place="cpu")
    source = tiny_source(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read") as info:
        build_model(recipe_with({}), source, CPU, place="cpu")
    assert "\n" not in str(info.value)


def test_cancel_ends_the_build(tmp_path):
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        build_model(recipe_with({}), tiny_source(tmp_path, has_weights=False), CPU, place="meta", cancel=cancel)


def test_cache_is_off_and_mode_is_train(tmp_path):
    model = build_model(recipe_with({}), tiny_source(tmp_path), CPU, place="cpu")
    assert model.training
    assert model.get_base_model().config.use_cache is False
    assert build_optimizer(recipe_with({}), model).param_groups


def test_nothing_is_written_to_the_terminal(tmp_path, capfd):
    import logging

    source = tiny_source(tmp_path)
    capfd.readouterr()
    for changes in ({"quantization.load_in_8bit": True}, {"training.gradient_checkpointing": True}):
        recipe = recipe_with(changes)
        model = build_model(recipe, source, CPU, place="cpu")
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record, messages=messages: messages.append(record.getMessage())
        logging.getLogger("bitsandbytes").addHandler(handler)
        for _ in range(2):
            _step(recipe, model)
        logging.getLogger("bitsandbytes").removeHandler(handler)
        assert len(messages) == len(set(messages))  # bitsandbytes would warn once per layer and step.
    assert "it/s" not in "".join(capfd.readouterr())
