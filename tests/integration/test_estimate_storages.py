"""The trace makes the storages that the same steps make with real tensors on this CPU, one by one and in order."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from workbench.components.model import build_model, load_weight_dtype, resolve_precision
from workbench.components.optimizer import build_optimizer
from workbench.components.source import find_source
from workbench.components.step import micro_step
from workbench.estimate.garbage import collection_paused
from workbench.estimate.quantized import add_quant_states
from workbench.estimate.recorder import SCRATCH, StorageRecorder
from workbench.estimate.tape import Tape
from workbench.estimate.trace import TraceShape, trace_run
from workbench.hardware import Device
from workbench.recipe import Recipe

BATCH, LENGTH = 2, 24
SEGMENTS = ("first", "later", "step", "step_again", "zero")
CPU = Device(name="CPU", kind="cpu", capacity_bytes=2**34, flops_per_s={"float32": 1e11}, bandwidth_bytes_per_s=1e10)

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 128, "num_attention_heads": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64},
    "qwen2": {"model_type": "qwen2", **SMALL, "intermediate_size": 64, "num_key_value_heads": 2},
    "gemma2": {"model_type": "gemma2", **SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8},
    "phi": {"model_type": "phi", **SMALL, "intermediate_size": 64},
    "mistral": {
        "model_type": "mistral", **SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 8,
    },
    "gpt_neox": {"model_type": "gpt_neox", **SMALL, "intermediate_size": 64},
    # transformers makes a mask for a window as soon as it is no longer than the sample.
    "mistral, window of the length": {
        "model_type": "mistral", **SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": LENGTH,
    },
    "mistral, wider window": {
        "model_type": "mistral", **SMALL, "intermediate_size": 64, "num_key_value_heads": 2,
        "sliding_window": LENGTH + 1,
    },
}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"adapter.method": "none"},
    "two tasks": {"tasks.data": ["a=x.jsonl", "b=y.jsonl"]},
    "new tokens": {"model.new_tokens": ["<a>", "<b>"]},
    "bottleneck": {"adapter.method": "bottleneck", "adapter.bottleneck_size": 8},
    "bottleneck, checkpointing, bf16": {
        "adapter.method": "bottleneck", "training.gradient_checkpointing": True, "training.mixed_precision": "bf16",
    },
    "full, checkpointing": {"adapter.method": "none", "training.gradient_checkpointing": True},
    "lora, checkpointing": {"training.gradient_checkpointing": True},
    "dropout": {"adapter.lora_dropout": 0.1},
    "dropout, checkpointing": {"adapter.lora_dropout": 0.1, "training.gradient_checkpointing": True},
    "dora": {"adapter.use_dora": True},
    "bf16": {"training.mixed_precision": "bf16"},
    "bf16, full": {"training.mixed_precision": "bf16", "adapter.method": "none"},
    "bf16, full, checkpointing": {
        "training.mixed_precision": "bf16", "adapter.method": "none", "training.gradient_checkpointing": True,
    },
    "bf16 weights": {"model.dtype": "bfloat16"},
    "bf16 weights, 16-bit adapter": {"model.dtype": "bfloat16", "adapter.autocast_adapter_dtype": False},
    "eager": {"model.attn_implementation": "eager"},
    "chunked loss": {"training.loss_type": "chunked_nll"},
    "chunked loss, bf16": {"training.loss_type": "chunked_nll", "training.mixed_precision": "bf16"},
    "foreach": {"training.optim": "adamw_torch", "adapter.method": "none"},
    "adafactor": {"training.optim": "adafactor", "adapter.method": "none"},
    "sgd": {"training.optim": "sgd", "adapter.method": "none"},
    "weight decay": {"training.weight_decay": 0.1, "training.optim": "adamw_torch"},
    "no clipping": {"training.max_grad_norm": 0.0},
    "padded": {"padded": True},
    "padded, eager": {"padded": True, "model.attn_implementation": "eager"},
    "packed": {"data.packing": True},
    "targets": {"adapter.target_modules": ["q_proj", "v_proj"]},
    "8-bit adamw": {"training.optim": "adamw_bnb_8bit"},
    "8-bit lion": {"training.optim": "lion_8bit", "adapter.method": "none"},
    "4-bit": {"quantization.load_in_4bit": True},
    "4-bit nested": {"quantization.load_in_4bit": True, "quantization.bnb_4bit_use_double_quant": True},
    "4-bit, checkpointing, bf16": {
        "quantization.load_in_4bit": True, "training.gradient_checkpointing": True, "training.mixed_precision": "bf16",
    },
    "4-bit, 16-bit norms": {
        "quantization.load_in_4bit": True, "quantization.prepare_model_for_kbit_training": False,
        "model.dtype": "bfloat16",
    },
    "8-bit": {"quantization.load_in_8bit": True},
    "every 2nd layer checkpointed": {
        "training.gradient_checkpointing": True, "training.gradient_checkpointing_every": 2, "adapter.method": "none",
    },
    "first layer kept": {
        "training.gradient_checkpointing": True, "training.gradient_checkpointing_keep_first": 1,
    },
    "activations in 8 bits": {"training.activation_storage": "8bit", "adapter.method": "none"},
    "activations in 4 bits, bf16": {"training.activation_storage": "4bit", "training.mixed_precision": "bf16"},
    "inputs in 8 bits, checkpointing": {
        "training.activation_storage": "8bit", "training.gradient_checkpointing": True,
    },
}  # fmt: skip
NEEDS_BITSANDBYTES = ("4-bit", "8-bit")


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """A collection in the middle would free at an instant that is of neither run."""
    with collection_paused():
        yield


class _WatchBackward(TorchFunctionMode):
    """Tells the recorder when backward begins, as the trace's own mode does."""

    def __init__(self, recorder: StorageRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward:
            self._recorder.begin_phase("backward")
            torch.autograd.backward(args[0])
            return None
        return func(*args, **(kwargs or {}))


def _batch(padded: bool, packed: bool) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 100, (BATCH, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if padded:
        batch["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
        batch["attention_mask"][1, LENGTH // 2 :] = 0
    if packed:
        positions = torch.arange(LENGTH).repeat(BATCH, 1)
        positions[:, LENGTH // 2 :] -= LENGTH // 2
        batch["position_ids"] = positions
    return batch


def _run_real(recipe: Recipe, model: torch.nn.Module, padded: bool) -> Tape:
    """Execute two micro-batches and two optimizer steps with real tensors, in the order of the trace."""
    batches = [_batch(padded, recipe.data.packing) for _ in range(2)]
    if recipe.tasks.data:
        for batch in batches:
            batch["task"] = torch.arange(BATCH)
    num_items = torch.tensor(2 * BATCH * LENGTH)
    optimizer = build_optimizer(recipe, model)
    precision = resolve_precision(recipe, CPU)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    recorder = StorageRecorder(model, "cpu")
    with torch.enable_grad(), _WatchBackward(recorder), recorder:
        for name, batch in zip(("first", "later"), batches, strict=True):
            recorder.begin_segment(name, "forward")
            micro_step(recipe, model, batch, num_items, precision)
        for name in ("step", "step_again"):
            recorder.begin_segment(name, "optimizer")
            if recipe.training.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(parameters, recipe.training.max_grad_norm)
            optimizer.step()
        recorder.begin_segment("zero", "optimizer")
        model.zero_grad()
        recorder.begin_segment("end", "end")
    recorder.close()
    return recorder.tape


def _events(tape: Tape, segment: str) -> list[tuple[int, str]]:
    """Return (signed bytes, operator) of each event.

    Left out are the batch itself and what kernels take for themselves, which no recorder can see in a real run.
    """
    begin, end = tape.segments()[segment]
    inputs = {token for token, category in tape.categories.items() if category == "input"}
    rows = []
    for event in tape.events[begin:end]:
        token = event if event >= 0 else ~event
        name = tape.operator_names[tape.operators[token]]
        if token not in inputs and not name.endswith(SCRATCH):
            rows.append((tape.sizes[token] if event >= 0 else -tape.sizes[token], name))
    return _with_sorted_deaths(rows)


def _with_sorted_deaths(rows: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Sort deaths that follow each other: which of them comes first (a hash map's order) changes no memory."""
    runs = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row[0] < 0)]
    return [row for run in runs for row in (sorted(run) if run[0][0] < 0 else run)]


def _cases() -> Iterator[Any]:
    for name, changes in CHANGES.items():
        yield pytest.param("tiny-llama", changes, id=f"tiny-llama: {name}")
    for architecture in ARCHITECTURES:
        names = ("lora", "full, checkpointing", "bf16, full", "padded", "eager")
        for name in ("lora", "padded") if "window" in architecture else names:
            yield pytest.param(architecture, CHANGES[name], id=f"{architecture}: {name}")


@pytest.mark.parametrize(("model_name", "changes"), list(_cases()))
def test_traced_storages_are_the_real_ones(model_name: str, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    padded = bool(changes.pop("padded", False))
    if any("load_in" in key or "8bit" in str(value) for key, value in changes.items()):
        pytest.importorskip("bitsandbytes")
    if model_name in ARCHITECTURES:
        changes["model.config"] = ARCHITECTURES[model_name]
    else:
        changes["model.name_or_path"] = model_name
    recipe = Recipe().with_changes({"training.mixed_precision": "no", **changes})
    source = find_source(recipe, for_training=model_name not in ARCHITECTURES)
    dtype = load_weight_dtype(recipe, source, CPU)
    meta = build_model(recipe, source, CPU, place="meta")
    add_quant_states(meta, recipe, dtype)
    shape = TraceShape(BATCH, LENGTH, 0, padded, recipe.data.packing)
    traced = trace_run(recipe, meta, CPU, shape, load_dtype=dtype).tape
    real = build_model(recipe, source, CPU, place="cpu", allow_random_weights=True)
    executed = _run_real(recipe, real, padded)

    for segment in SEGMENTS:
        expected, seen = _events(executed, segment), _events(traced, segment)
        if seen != expected:
            pytest.fail(f"{segment}: {_difference(seen, expected)}")


def _difference(traced: list[tuple[int, str]], executed: list[tuple[int, str]]) -> str:
    matcher = difflib.SequenceMatcher(None, traced, executed, autojunk=False)
    parts = [
        f"{tag} traced {traced[i1:i2][:5]} executed {executed[j1:j2][:5]}"
        for tag, i1, i2, j1, j2 in matcher.get_opcodes()
        if tag != "equal"
    ]
    return f"{len(parts)} differences: " + "; ".join(parts[:6])
