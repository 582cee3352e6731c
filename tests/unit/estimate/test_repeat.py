"""An evaluation whose repeated layers are copied gives the tape of one that runs every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from workbench.components.model import build_model, load_weight_dtype
from workbench.components.source import find_source
from workbench.estimate.garbage import collection_paused
from workbench.estimate.repeat import Repeater
from workbench.estimate.tape import Tape
from workbench.estimate.trace import TraceShape, trace_run
from workbench.hardware import find_device
from workbench.recipe import Recipe

DEVICE = find_device("Tesla T4")
SHAPE = TraceShape(batch_size=2, length=48, eval_batch_size=3, padded=False, packed=False)
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SMALL}
# name: (config, period, layers that need not run, changes)
CASES: dict[str, tuple[dict[str, Any], int, int, dict[str, Any]]] = {
    # Autocast keeps float16 casts of the adapters, which outlive their layer.
    "lora": (LLAMA, 1, 5, {}),
    "full, float32": (LLAMA, 1, 5, {"adapter.method": "none", "training.mixed_precision": "no"}),
    "eager": (LLAMA, 1, 5, {"model.attn_implementation": "eager"}),
    "windows": (
        {"model_type": "gemma3_text", **SMALL, "head_dim": 16, "sliding_window": 16,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
        3, 3, {},
    ),
    "experts": ({"model_type": "mixtral", **SMALL, "num_local_experts": 4}, 1, 5, {}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    with collection_paused():
        yield


def _tape(recipe: Recipe, repeats: tuple[int, int] | None) -> Tape:
    source = find_source(recipe, for_training=False)
    dtype = load_weight_dtype(recipe, source, DEVICE)
    model = build_model(recipe, source, DEVICE, place="meta")
    tape = trace_run(recipe, model, DEVICE, SHAPE, load_dtype=dtype, repeats=repeats).tape
    assert not any("forward" in vars(module) for module in model.modules()), "a layer keeps the stand-in"
    return tape


@pytest.mark.parametrize("name", CASES)
def test_copied_layers_are_the_layers_that_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, period, num_copied, changes = CASES[name]
    recipe = Recipe().with_changes({"model.config": config, **changes})
    copied = []
    original = Repeater._repeat
    monkeypatch.setattr(
        Repeater, "_repeat", lambda self, record, layer: (copied.append(layer), original(self, record, layer))[1]
    )
    every, few = _tape(recipe, None), _tape(recipe, (6, period))
    assert len(copied) == num_copied
    for field in fields(Tape):
        assert getattr(few, field.name) == getattr(every, field.name), field.name


def test_a_layer_of_another_kind_is_never_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a period that is wrong the arguments differ, and every layer runs."""
    config, _, _, _ = CASES["windows"]
    types = ["sliding_attention", "full_attention"] * 3
    recipe = Recipe().with_changes({"model.config": {**config, "layer_types": types}, "data.max_length": 48})
    monkeypatch.setattr(Repeater, "_repeat", lambda *_: pytest.fail("a layer was copied"))
    _tape(recipe, (6, 3))
