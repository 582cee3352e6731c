"""flash-attn and FlexAttention in a trace: what transformers' code around them does, and what their kernels keep."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from transformers import modeling_flash_attention_utils

from workbench.estimate import BatchShape, estimate_run
from workbench.estimate.packages import _flash_functions, replaced_here
from workbench.estimate.shape import reshaped, shape_of_lengths
from workbench.estimate.trace import TraceShape
from workbench.hardware import find_device
from workbench.recipe import Recipe

np = pytest.importorskip("numpy")
A100 = find_device("NVIDIA A100 80GB")
CONFIG = {
    "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512, "dtype": "bfloat16",
}  # fmt: skip
TINY = Recipe().with_changes({"model.config": CONFIG, "data.max_length": 1024, "adapter.method": "none"})
# Eight samples of 1,024 tokens at most, a quarter of them real.
PADDED = BatchShape(2, 1024, 1024.0, 512.0, True, "data", 100, 1280)


def _peak(attention: str, shape: BatchShape | None = None, **changes: Any) -> int:
    recipe = TINY.with_changes({"model.attn_implementation": attention, "evaluation.split": "none", **changes})
    return estimate_run(recipe, A100, shape=shape).memory.peak_allocated_bytes


def test_without_padding_the_package_keeps_what_torchs_own_flash_kernel_keeps() -> None:
    assert _peak("flash_attention_2") == _peak("sdpa")


def test_padding_is_taken_out_before_the_kernel_and_no_mask_is_made() -> None:
    full = dataclasses.replace(PADDED, max_real_tokens=None)
    saved = _peak("flash_attention_2", full) - _peak("flash_attention_2", PADDED)
    # Of each of six layers: query, key and value of the padding, and the kernel's output, in bfloat16.
    padding, per_token = 2 * 1024 - 1280, (256 + 2 * 64 + 256) * 2
    assert saved >= 6 * padding * per_token
    assert _peak("sdpa", PADDED) - _peak("flash_attention_2", PADDED) > 2 * 1024 * 1024 * 2  # at least one mask


def test_recomputation_goes_through_the_package_too() -> None:
    changes = {"training.gradient_checkpointing": True}
    assert _peak("flash_attention_2", **changes) < _peak("flash_attention_2")
    assert _peak("flex_attention", **changes) < _peak("flex_attention")


def test_flex_attention_makes_no_mask_of_all_pairs() -> None:
    grown = _peak("flex_attention", PADDED) - _peak("flex_attention", dataclasses.replace(PADDED, padded=False))
    assert grown < 2 * 1024 * 16  # the padding mask and its blocks, not S x S
    # It keeps what flash keeps; only the sums of rows are larger by what transformers returns of them.
    assert _peak("flex_attention") == pytest.approx(_peak("flash_attention_2"), rel=0.02)


@pytest.mark.parametrize("causal", [True, False])
def test_the_kernels_keep_and_return_what_flash_attn_does(causal: bool) -> None:
    told: list[tuple[int, int, str, bool]] = []
    dense, varlen = _flash_functions(lambda *work: told.append(work))
    query = torch.empty((2, 100, 4, 20), dtype=torch.float16, device="meta", requires_grad=True)
    key = torch.empty((2, 100, 2, 20), dtype=torch.float16, device="meta")
    output = dense(query, key, key, causal=causal)
    assert output.shape == query.shape
    kept = output.grad_fn.next_functions[0][0].saved_tensors  # type: ignore[union-attr]  # below the slice
    assert [tuple(item.shape) for item in kept if item is not None] == [
        (2, 100, 4, 24), (2, 100, 2, 24), (2, 100, 2, 24), (2, 100, 4, 24), (2, 4, 100), (2,),
    ]  # fmt: skip
    output.sum().backward()
    assert query.grad is not None
    assert told[0][0] == 2 * 2 * 4 * 100 * 100 * 48 // (2 if causal else 1)
    assert [work[3] for work in told] == [False, True]
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    flat = varlen(query.flatten(0, 1), key.flatten(0, 1), key.flatten(0, 1), bounds, bounds, 100, 100, causal=causal)
    assert flat.shape == (200, 4, 20)
    assert told[2] == told[0]


def test_a_window_leaves_out_pairs() -> None:
    told: list[tuple[int, int, str, bool]] = []
    dense, _ = _flash_functions(lambda *work: told.append(work))
    query = torch.empty((1, 100, 4, 32), dtype=torch.float16, device="meta")
    dense(query, query, query, causal=True, window_size=(9, 9))
    dense(query, query, query, causal=False, window_size=(9, 9))
    assert [work[0] for work in told] == [2 * 4 * 100 * seen * 64 for seen in (10, 19)]


def test_other_threads_see_the_original() -> None:
    original, seen = modeling_flash_attention_utils._is_packed_sequence, []
    with replaced_here(modeling_flash_attention_utils, "_is_packed_sequence", lambda *_: "stand-in"):
        assert modeling_flash_attention_utils._is_packed_sequence(None, 1) == "stand-in"
        thread = threading.Thread(
            target=lambda: seen.append(modeling_flash_attention_utils._is_packed_sequence(None, 1))
        )
        thread.start()
        thread.join()
    assert seen == [False]
    assert modeling_flash_attention_utils._is_packed_sequence is original


def test_the_fullest_batch_holds_the_longest_samples() -> None:
    recipe = Recipe().with_changes({"training.per_device_train_batch_size": 2, "data.max_length": 64})
    shape = shape_of_lengths(recipe, np.array([10, 40, 64, 30, 5]))
    assert shape.max_real_tokens == 104
    assert (
        reshaped(shape, recipe, recipe.with_changes({"training.per_device_train_batch_size": 3})).max_real_tokens == 156
    )
    assert (
        reshaped(shape, recipe, recipe.with_changes({"training.per_device_train_batch_size": 1})).max_real_tokens == 64
    )
    assert TraceShape(2, 64, 0, padded=True, packed=False).real_share == 1.0
