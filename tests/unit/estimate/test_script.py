"""Runs of other training scripts: what they keep, which kernel they pin, and that few layers stand for many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench.estimate.estimate import BatchShape, Estimate
from workbench.estimate.run import clear_caches, estimate_run
from workbench.estimate.script import Script
from workbench.hardware import find_device
from workbench.recipe import Recipe

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "dtype": "float16",
}
BATCH, LENGTH = 2, 256
SHAPE = BatchShape(BATCH, LENGTH, LENGTH, LENGTH, False, "max_length")


def recipe(**changes: Any) -> Recipe:
    base = {
        "model.config": CONFIG,
        "model.dtype": "float16",
        "training.gradient_accumulation_steps": 1,
        "training.mixed_precision": "no",
        "training.gradient_checkpointing": True,
        "training.optim": "adamw_torch",
        "evaluation.split": "none",
    }
    return Recipe().with_changes({**base, **changes})


def on_t4(changed: Recipe, script: Script | None = None) -> Estimate:
    return estimate_run(changed, find_device("Tesla T4"), shape=SHAPE, script=script or Script())


def forward(_: Recipe, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    outputs = model(**batch)
    return outputs.loss, outputs


def test_outputs_that_a_loop_keeps_are_alive_in_the_optimizer_step() -> None:
    dropped = on_t4(recipe(), Script("drops", forward))
    kept = on_t4(recipe(), Script("keeps", forward, keeps_outputs=True))
    more = kept.memory.peak_by_phase["optimizer"] - dropped.memory.peak_by_phase["optimizer"]
    logits = BATCH * LENGTH * CONFIG["vocab_size"] * 2  # type: ignore[operator]  # an int of a mixed dict
    assert logits <= more <= logits + 2**21
    assert kept.memory.rest_bytes == dropped.memory.rest_bytes


def test_a_pinned_kernel_repeats_shared_heads_instead_of_making_square_matrices() -> None:
    # Without a pin a T4 has no fused kernel for shared key heads and makes S x S matrices.
    plain = on_t4(recipe()).memory.peak_by_phase["recompute"]
    pinned = on_t4(recipe(), Script("pins", sdpa_kernel="efficient")).memory.peak_by_phase["recompute"]
    square = BATCH * CONFIG["num_attention_heads"] * LENGTH**2 * 2  # type: ignore[operator]  # an int of a mixed dict
    assert plain - pinned >= square


def test_a_model_changed_by_a_script_is_not_taken_for_the_unchanged_one() -> None:
    def widen(model: nn.Module) -> nn.Module:
        model.register_buffer("table", torch.empty(2**20, dtype=torch.float32, device="meta"))
        return model

    before = on_t4(recipe()).memory.rest_bytes
    widened = on_t4(recipe(), Script("widens", adapt=widen)).memory.rest_bytes
    assert widened - before == 4 * 2**20
    assert on_t4(recipe()).memory.rest_bytes == before


@pytest.mark.parametrize("bits", [0, 4])
def test_few_layers_stand_for_many_also_where_layers_are_computed_again(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bits:
        pytest.importorskip("bitsandbytes")
    changed = recipe(**{"quantization.load_in_4bit": bool(bits)})
    clear_caches()
    unrolled = on_t4(changed).memory
    clear_caches()
    monkeypatch.setattr("workbench.estimate.run._period", lambda *_: 0)
    whole = on_t4(changed).memory
    clear_caches()
    assert unrolled.peak_allocated_bytes == whole.peak_allocated_bytes
    assert unrolled.peak_by_phase == whole.peak_by_phase
