"""Predict, then measure, on this machine's NVIDIA GPU: 20 configurations of random weights, in under 8 minutes.

Run: ``python -m benchmarks.gpu_accuracy [--dry-run] [--only NAME] [--out benchmarks/recorded]``

Each configuration trains three optimizer steps in a process of its own, through the same ``components/`` as a real run.
The predicted and measured figures and, for some, every block that torch's allocator gave and took go to one JSON file
each; the recorded events become golden tests of the allocator replay, which need no GPU. ``--dry-run`` runs the same
loop on the CPU with two layers, to see that every configuration builds and trains. Without a GPU nothing is done.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recorded"
NUM_STEPS = 3
CHILD_TIMEOUT_S = 90
# A dry run shares a CPU with whatever else runs there.
DRY_TIMEOUT_S = 600
TOTAL_S = 480
# Events kept of one run: enough for three steps of a small model, a few MB of JSON.
MAX_EVENTS = 200_000

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "dtype": "bfloat16",
}
_QWEN = {**_LLAMA, "model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": True, "num_hidden_layers": 8}
_GEMMA = {**_LLAMA, "model_type": "gemma2", "head_dim": 64, "num_hidden_layers": 8, "vocab_size": 64000}
_GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "dtype": "float32"}
_WHOLE = {"adapter.method": "none"}
_FOUR = {"quantization.load_in_4bit": True}
_SAVES = {"training.gradient_checkpointing": True}


@dataclass(frozen=True)
class Configuration:
    """One run: a config of random weights and the fields that differ from the base."""

    name: str
    config: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 4
    length: int = 1024
    keeps_events: bool = False


CONFIGURATIONS = (
    Configuration("lora", _LLAMA, keeps_events=True),
    Configuration("lora-checkpointing", _LLAMA, _SAVES, keeps_events=True),
    Configuration("lora-dropout", _LLAMA, {"adapter.lora_dropout": 0.1}),
    Configuration("lora-dora", _LLAMA, {"adapter.use_dora": True}),
    Configuration("lora-eager", _LLAMA, {"model.attn_implementation": "eager"}, batch_size=2),
    Configuration("lora-expandable", _LLAMA, {"hardware.expandable_segments": True}, keeps_events=True),
    Configuration("lora-accumulation", _LLAMA, {"training.gradient_accumulation_steps": 4}),
    Configuration("lora-no-autocast", _LLAMA, {"training.mixed_precision": "no"}),
    Configuration("nf4", _LLAMA, _FOUR, keeps_events=True),
    Configuration(
        "nf4-double-checkpointing", _LLAMA, {**_FOUR, **_SAVES, "quantization.bnb_4bit_use_double_quant": True}
    ),
    Configuration("int8", _LLAMA, {"quantization.load_in_8bit": True}),
    Configuration("full-fused", _LLAMA, _WHOLE),
    Configuration("full-foreach", _LLAMA, {**_WHOLE, "training.optim": "adamw_torch"}, keeps_events=True),
    Configuration("full-8bit", _LLAMA, {**_WHOLE, "training.optim": "adamw_bnb_8bit"}),
    Configuration("full-adafactor", _LLAMA, {**_WHOLE, "training.optim": "adafactor"}),
    Configuration("full-fp16", _LLAMA, {**_WHOLE, "training.mixed_precision": "fp16"}),
    Configuration("large-vocabulary", _QWEN, batch_size=2),
    Configuration("large-vocabulary-chunked", _QWEN, {"training.loss_type": "chunked_nll"}, batch_size=2),
    Configuration("gemma2", _GEMMA, batch_size=2),
    Configuration("gpt2-full", _GPT2, {**_WHOLE, "training.mixed_precision": "no"}, length=512),
)


def main(argv: list[str] | None = None) -> int:
    """Run every configuration in a process of its own; returns the exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.child:
        print(json.dumps(run_one(_find(arguments.child), arguments.dry_run)))
        return 0
    chosen = [item for item in CONFIGURATIONS if arguments.only in item.name]
    if not arguments.dry_run:
        import torch

        if not torch.cuda.is_available():
            print("No NVIDIA GPU here: nothing was measured. Try --dry-run, or run this where there is one.")
            return 0
    began, failed, errors = time.perf_counter(), [], []
    for item in chosen:
        if time.perf_counter() - began > TOTAL_S - CHILD_TIMEOUT_S and not arguments.dry_run:
            print(f"stopped before {item.name}: {TOTAL_S} s are nearly over")
            break
        record = _run_child(item, arguments.dry_run)
        if "error" in record:
            failed.append(item.name)
            print(f"{item.name:28} failed: {record['error']}")
            continue
        print(f"{item.name:28} {_line(record)}")
        if not arguments.dry_run:
            errors.append(record["predicted"]["peak_allocated_bytes"] / record["measured"]["peak_allocated_bytes"] - 1)
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{item.name}.json").write_text(json.dumps(record), encoding="utf-8")
    if errors:
        print(f"allocated: mean {statistics.fmean(map(abs, errors)):.2%}, worst {max(errors, key=abs):+.2%}")
    return 1 if failed else 0


def run_one(item: Configuration, is_dry: bool) -> dict[str, Any]:
    """Predict and run one configuration in this process; returns what is stored."""
    import torch

    from workbench.components.model import resolve_precision
    from workbench.components.optimizer import build_optimizer
    from workbench.components.step import micro_step
    from workbench.estimate import estimate_run
    from workbench.estimate.estimate import BatchShape
    from workbench.hardware import find_device, read_device
    from workbench.recipe import require_valid

    place = "cpu" if is_dry else "cuda"
    recipe, length = recipe_of(item, is_dry), 32 if is_dry else item.length
    device = read_device(place)
    require_valid(recipe, device.facts(for_estimate=False))
    shape = BatchShape(item.batch_size, length, length, length, False, "max_length")
    estimate = estimate_run(recipe, find_device("Tesla T4") if is_dry else device, shape=shape)
    if not is_dry:
        torch.cuda.init()
        if item.keeps_events:
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, context=None)
    model = _build(recipe, device, place)
    precision = resolve_precision(recipe, device)
    optimizer = build_optimizer(recipe, model)
    scaler = torch.amp.GradScaler(place) if precision.uses_grad_scaler else None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    accumulation, seconds, loss = recipe.training.gradient_accumulation_steps, [], 0.0
    for _ in range(NUM_STEPS):
        began = time.perf_counter()
        for _ in range(accumulation):
            tokens = torch.randint(0, item.config["vocab_size"], (item.batch_size, length), device=place)
            batch = {"input_ids": tokens, "labels": tokens.clone()}
            num_items = torch.tensor(item.batch_size * (length - 1) * accumulation, device=place)
            loss = float(micro_step(recipe, model, batch, num_items, precision, scaler))
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, recipe.training.max_grad_norm)
        scaler.step(optimizer) if scaler is not None else optimizer.step()
        if scaler is not None:
            scaler.update()
        model.zero_grad()
        if not is_dry:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {
        "name": item.name,
        "recipe": recipe.to_dict(only_changed=True),
        "shape": [item.batch_size, length],
        "versions": _versions(),
        "predicted": _predicted(estimate),
        "measured": {"step_s": min(seconds), "loss": loss} if is_dry else _measured(seconds),
        "events": _events() if item.keeps_events and not is_dry else [],
    }


def recipe_of(item: Configuration, is_dry: bool) -> Any:
    """Return the Recipe of a configuration; a dry run has two layers, no fp16 and no kernels that need a GPU."""
    from workbench.recipe import Recipe

    config = dict(item.config)
    changes = {
        "model.dtype": config["dtype"],
        "data.max_length": item.length,
        "training.per_device_train_batch_size": item.batch_size,
        "training.gradient_accumulation_steps": 1,
        "training.mixed_precision": "bf16",
        "evaluation.split": "none",
        **item.changes,
    }
    if is_dry:
        config |= {"n_layer": 2, "n_embd": 48} if config["model_type"] == "gpt2" else {"num_hidden_layers": 2}
        changes |= {"model.dtype": "float32", "training.mixed_precision": "no", "data.max_length": 32}
    return Recipe().with_changes({**changes, "model.config": config})


def _build(recipe: Any, device: Any, place: str) -> Any:
    """Return the model with random weights; a quantized one is loaded from a checkpoint made for it."""
    from workbench.components.model import build_model
    from workbench.components.source import find_source

    source = find_source(recipe, for_training=False)
    if not recipe.quantization.bits:
        return build_model(recipe, source, device, place=place, allow_random_weights=True)
    with tempfile.TemporaryDirectory() as folder:
        plain = recipe.with_changes(
            {"adapter.method": "none", "quantization.load_in_4bit": False, "quantization.load_in_8bit": False}
        )
        build_model(plain, source, device, place="cpu", allow_random_weights=True).save_pretrained(folder)
        stored = recipe.with_changes({"model.name_or_path": folder, "model.config": None})
        return build_model(stored, find_source(stored, for_training=False), device, place=place)


def _predicted(estimate: Any) -> dict[str, Any]:
    memory = estimate.memory
    return {
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "process_bytes": memory.process_bytes,
        "interval_bytes": list(memory.interval_bytes),
        "peak_phase": memory.peak_phase,
        "step_s": estimate.time.step_s,
    }


def _measured(seconds: list[float]) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "context_bytes": total - free - reserved,
        "step_s": min(seconds),
    }


def _events() -> list[list[int]]:
    """Return ``[1, address, bytes]`` for each block that was given and ``[0, address, bytes]`` for each taken back."""
    import torch

    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    kinds = {"alloc": 1, "free_completed": 0}
    return [[kinds[item["action"]], item["addr"], item["size"]] for item in trace if item["action"] in kinds]


def _versions() -> dict[str, str]:
    import torch
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {"torch": torch.__version__, "transformers": transformers.__version__, "gpu": gpu}


def _run_child(item: Configuration, is_dry: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu_accuracy", "--child", item.name] + (
        ["--dry-run"] if is_dry else []
    )
    limit = DRY_TIMEOUT_S if is_dry else CHILD_TIMEOUT_S
    environment = dict(os.environ)
    if item.changes.get("hardware.expandable_segments"):
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {limit} s"}
    if result.returncode:
        return {"error": (result.stderr.strip().splitlines() or ["no message"])[-1]}
    record: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return record


def _line(record: dict[str, Any]) -> str:
    predicted, measured = record["predicted"], record["measured"]
    if "loss" in measured:
        return f"builds and trains (loss {measured['loss']:.3f}, {measured['step_s']:.2f} s a step)"
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "step_s")
    return ", ".join(f"{name} {predicted[name] / measured[name] - 1:+.1%}" for name in names)


def _find(name: str) -> Configuration:
    return next(item for item in CONFIGURATIONS if item.name == name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_accuracy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="two layers on the CPU: does every configuration work?")
    parser.add_argument("--only", default="", help="only configurations whose name holds this text")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the records")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
