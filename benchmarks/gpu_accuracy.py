"""Predict, then measure, on this machine's NVIDIA GPU: 20 configurations of random weights, in under 8 minutes.

Run: ``python -m benchmarks.gpu_accuracy [--dry-run] [--only NAME] [--out benchmarks/recorded]``

Each configuration trains three optimizer steps in a process of its own, through the same ``components/`` as a real run.
The predicted and measured figures and, for some, every block that torch's allocator gave and took go to one JSON file
each; the recorded events become golden tests of the allocator replay, which need no GPU. ``--dry-run`` goes the whole
way on the CPU, two thin layers on an emulated T4, and stores its records only where ``--out`` says. Without a GPU
nothing else is done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.steps import Configuration

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


def _recording() -> Any:
    """Return the class of an emulated device that keeps the list of blocks it gave and took, as CUDA's history does."""
    import torch

    from workbench.estimate.allocator import workspace_bytes
    from workbench.observe.emulated import EmulatedDevice

    class Recording(EmulatedDevice):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.block_events: list[list[int]] = []
            self._sizes: dict[int, int] = {}
            super().__init__(*args, **kwargs)
            for index, num_bytes in enumerate(workspace_bytes(self.device.compute_capability, torch.__version__)):
                self.block_events.append([1, -1 - index, num_bytes])

        def _note(self, num_bytes: int, operator: int, layer: int) -> int:
            token = super()._note(num_bytes, operator, layer)
            if token >= 0:
                self._sizes[token] = num_bytes
                self.block_events.append([1, token, num_bytes])
            return token

        def _die(self, token: int) -> None:
            if token >= 0:
                self.block_events.append([0, token, self._sizes.pop(token)])
            super()._die(token)

    return Recording


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
        errors.append(record["predicted"]["peak_allocated_bytes"] / record["measured"]["peak_allocated_bytes"] - 1)
        folder = arguments.out or (None if arguments.dry_run else FOLDER)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{item.name}.json").write_text(json.dumps(record), encoding="utf-8")
    if errors:
        print(f"allocated: mean {statistics.fmean(map(abs, errors)):.2%}, worst {max(errors, key=abs):+.2%}")
    return 1 if failed else 0


def run_one(item: Configuration, is_dry: bool) -> dict[str, Any]:
    """Predict and run one configuration in this process; returns what is stored."""
    import torch

    from benchmarks.steps import Steps
    from workbench.estimate import estimate_run
    from workbench.hardware import find_device, read_device
    from workbench.recipe import require_valid

    item = small(item) if is_dry else item
    recipe = _in_bf16(item).recipe()
    here = read_device("cpu" if is_dry else "cuda")
    target = find_device("Tesla T4") if is_dry else here
    require_valid(recipe, here.facts(for_estimate=False))
    estimate = estimate_run(recipe, target, shape=item.shape())
    expandable = recipe.hardware.expandable_segments
    if is_dry:
        card = _recording()(target, expandable_segments=expandable)
        with card:
            steps = Steps(recipe, here, "cpu")
            card.adopt([*steps.model.parameters(), *steps.model.buffers()])
            seconds = steps.run(NUM_STEPS)
        card.is_on = False
        measured, events = _emulated(card, seconds), card.block_events
        card.close()
    else:
        torch.cuda.init()
        if item.keeps_events:
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, context=None)
        seconds = Steps(recipe, here, "cuda").run(NUM_STEPS)
        measured, events = _measured(seconds), _events() if item.keeps_events else []
    return {
        "name": item.name,
        "recipe": recipe.to_dict(only_changed=True),
        "shape": [item.batch_size, item.length],
        "is_emulated": is_dry,
        "expandable_segments": expandable,
        "versions": _versions(),
        "predicted": _predicted(estimate),
        "measured": measured,
        "events": events if item.keeps_events else [],
    }


def small(item: Configuration) -> Configuration:
    """Return a configuration that a CPU trains in a second: two thin layers, short samples, float32."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = dict(item.model)  # type: ignore[arg-type]  # inline configs here
    config |= {"n_layer": 2, "n_embd": 48} if config["model_type"] == "gpt2" else sizes
    config |= {"head_dim": 16} if "head_dim" in config else {}
    changes = {**item.changes, "model.dtype": "float32", "training.mixed_precision": "no"}
    return dataclasses.replace(item, model={**config, "vocab_size": 2048}, changes=changes, length=32)


def _in_bf16(item: Configuration) -> Configuration:
    """Return the configuration with autocast to bfloat16, which a modern GPU trains in, unless it says otherwise."""
    return dataclasses.replace(item, changes={"training.mixed_precision": "bf16", **item.changes})


def replay_events(events: list[list[int]], *, expandable_segments: bool) -> Any:
    """Return the allocator's counters after a list of ``[1, address, bytes]`` (given) and ``[0, address, bytes]``.

    What is taken back and was never given belongs to the time before the record, and is passed over.
    """
    from workbench.estimate.allocator import CachingAllocator

    allocator = CachingAllocator(expandable_segments=expandable_segments, is_compiled=len(events) > 1000)
    blocks: dict[int, int] = {}
    for is_given, address, num_bytes in events:
        if is_given:
            blocks[address] = allocator.malloc(num_bytes)
        elif address in blocks:
            allocator.free(blocks.pop(address))
    return allocator.stats()


def _emulated(card: Any, seconds: list[float]) -> dict[str, Any]:
    stats = card.stats()
    return {
        "peak_allocated_bytes": stats.peak_allocated,
        "peak_reserved_bytes": stats.peak_reserved,
        "context_bytes": card.device.context_bytes,
        "step_s": min(seconds),
    }


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
    names = ("peak_allocated_bytes", "peak_reserved_bytes", *(() if record["is_emulated"] else ("step_s",)))
    return ", ".join(f"{name} {predicted[name] / measured[name] - 1:+.1%}" for name in names)


def _find(name: str) -> Configuration:
    return next(item for item in CONFIGURATIONS if item.name == name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_accuracy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="two thin layers on the CPU, as an emulated T4")
    parser.add_argument("--only", default="", help="only configurations whose name holds this text")
    parser.add_argument("--out", type=Path, help="folder of the records (default benchmarks/recorded)")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
