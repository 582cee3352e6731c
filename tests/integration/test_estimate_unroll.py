"""A model traced with three layers and unrolled takes the memory of the model traced whole, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from workbench.components.model import build_model, load_weight_dtype
from workbench.components.source import find_source
from workbench.estimate.allocator import CachingAllocator
from workbench.estimate.assemble import Schedule, line_up
from workbench.estimate.garbage import collection_paused
from workbench.estimate.quantized import add_quant_states
from workbench.estimate.structure import layer_period
from workbench.estimate.trace import TraceShape, trace_run
from workbench.estimate.unroll import TRACED_LAYERS, NotUniformError, unroll, whole
from workbench.hardware import find_device
from workbench.recipe import Recipe

LAYERS = 15
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 16, "tie_word_embeddings": True},
    "phi3": {"model_type": "phi3", **SMALL, "pad_token_id": 0},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "vocab_size": 512},
    # Every third layer sees everything, the others a window of 16 tokens.
    "gemma3": {
        "model_type": "gemma3_text", **SMALL, "head_dim": 16, "sliding_window": 16,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * (LAYERS // 3),
    },
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"adapter.method": "none"},
    "full foreach checkpointing": {
        "adapter.method": "none", "training.optim": "adamw_torch", "training.gradient_checkpointing": True,
    },
    "dropout checkpointing": {"adapter.lora_dropout": 0.1, "training.gradient_checkpointing": True},
    "4-bit checkpointing": {"quantization.load_in_4bit": True, "training.gradient_checkpointing": True},
    "eager": {"model.attn_implementation": "eager"},
    "adafactor": {"training.optim": "adafactor"},
    "8-bit adamw": {"training.optim": "adamw_bnb_8bit", "adapter.method": "none"},
    "chunked loss": {"training.loss_type": "chunked_nll"},
    "full, activations in 4 bits": {"training.activation_storage": "4bit", "adapter.method": "none"},
    "activations in 8 bits": {"training.activation_storage": "8bit"},
    "bfloat16 model, float16 products": {"model.dtype": "bfloat16"},
    "full, bfloat16 model": {"model.dtype": "bfloat16", "adapter.method": "none"},
    "offload checkpointing": {"training.activation_storage": "offload", "training.gradient_checkpointing": True},
    "one micro-batch": {"training.gradient_accumulation_steps": 1},
}  # fmt: skip
DEVICE = find_device("Tesla T4")
SHAPE = TraceShape(batch_size=2, length=48, eval_batch_size=3, padded=False, packed=False)
CASES = [("llama", name) for name in CHANGES] + [
    (model, name)
    for model in ("qwen3", "phi3", "gpt2")
    for name in ("lora", "full foreach checkpointing", "dropout checkpointing")
]


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """A collection in the middle would free at an instant that is of neither run."""
    with collection_paused():
        yield


def _schedule(recipe: Recipe, num_layers: int | None, period: int = 1) -> Schedule:
    source = find_source(recipe, for_training=False)
    dtype = load_weight_dtype(recipe, source, DEVICE)
    model = build_model(recipe, source, DEVICE, place="meta", num_hidden_layers=num_layers)
    add_quant_states(model, recipe, dtype)
    repeats = None if num_layers is None else (num_layers, period)
    tape = trace_run(recipe, model, DEVICE, SHAPE, load_dtype=dtype, repeats=repeats).tape
    life = whole(tape) if num_layers is None else unroll(tape, LAYERS, period)
    return line_up(life, recipe.training.gradient_accumulation_steps)


def _work(schedule: Schedule) -> tuple[int, int, int]:
    """Return operators, floating-point operations and bytes of all segments."""
    life = schedule.life
    pairs = list(zip(life.weights.tolist(), life.tape.work, strict=True))
    return (
        sum(weight for weight, _ in pairs),
        sum(weight * work.flops for weight, work in pairs),
        sum(weight * work.num_bytes for weight, work in pairs),
    )


def _signed(schedule: Schedule, segment: str) -> np.ndarray:
    begin, end = next((item.begin, item.end) for item in schedule.stretches if item.name == segment)
    events = schedule.events[begin:end]
    return np.where(events >= 0, 1, -1) * schedule.sizes[np.where(events >= 0, events, ~events)]


def _compare(recipe: Recipe, period: int) -> None:
    few = _schedule(recipe, TRACED_LAYERS * period, period)
    full = _schedule(recipe, None)
    for segment in dict.fromkeys(item.name for item in few.stretches):
        first, second = _signed(few, segment), _signed(full, segment)
        assert len(first) == len(second), f"{segment}: {len(first)} events unrolled, {len(second)} traced"
        assert np.array_equal(first, second), f"{segment}: other events from {np.flatnonzero(first != second)[0]} on"
    (operators, flops, moved), (all_operators, all_flops, all_moved) = _work(few), _work(full)
    assert (operators, flops) == (all_operators, all_flops)
    assert moved == pytest.approx(all_moved, rel=1e-4)  # the vector of gradient norms grows with the layers
    assert np.array_equal(few.categories[few.events[few.events >= 0]], full.categories[full.events[full.events >= 0]])
    results = []
    for schedule in (few, full):
        allocator = CachingAllocator()
        allocator.replay(schedule.events, schedule.sizes)
        results.append(allocator.stats())
    assert results[0] == results[1]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_unrolled_is_the_full_trace(model: str, name: str) -> None:
    changes = CHANGES[name]
    if any("4bit" in field or "8bit" in str(value) for field, value in changes.items()):
        pytest.importorskip("bitsandbytes")
    _compare(Recipe().with_changes({"model.config": MODELS[model], **changes}), period=1)


@pytest.mark.parametrize("name", ["lora", "full foreach checkpointing"])
def test_layers_of_two_kinds_are_unrolled_by_their_period(name: str) -> None:
    recipe = Recipe().with_changes({"model.config": MODELS["gemma3"], **CHANGES[name]})
    source = find_source(recipe, for_training=False)
    plain = recipe.with_changes({"adapter.method": "none"})
    period = layer_period(build_model(plain, source, DEVICE, place="meta"), source.config.get_text_config())
    assert period == 3
    _compare(recipe, period)
    with pytest.raises(NotUniformError):
        _schedule(recipe, TRACED_LAYERS, 1)
