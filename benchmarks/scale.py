"""Many devices: layouts side by side, the cost curve from 1 to 1,024 devices, and one run on several processes here.

    python -m benchmarks.scale [--json] [--plot FILE.html] [--processes 1 2]

Memory, traffic and step time are estimates: no such machine is needed. What is measured is a small run on this
machine's CPUs over gloo, started by ``workbench launch``, against the same run in one process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy_rows.scripts import OLD_TRAINER
from workbench.estimate import estimate_layouts
from workbench.estimate.layout import Layout, LayoutTable
from workbench.estimate.sharding import list_layouts
from workbench.hardware import find_device
from workbench.recipe import Recipe
from workbench.report.layouts import curve_figure, render_curve, render_layouts
from workbench.report.tables import render_table
from workbench.units import GIB, format_bytes

DEVICE, PER_MACHINE = "A100-SXM4-80GB", 8
COUNTS = tuple(2**power for power in range(11))
BASE = {
    "adapter.method": "none",
    "data.max_length": 2048,
    "training.per_device_train_batch_size": 1,
    "training.gradient_accumulation_steps": 8,
    "training.gradient_checkpointing": True,
    "training.mixed_precision": "bf16",
    "evaluation.split": "none",
}
CURVES = {"7B, all weights": {"model.name_or_path": "llama-2-7b"}, "70B, LoRA": {
    "model.name_or_path": "llama-2-70b", "adapter.method": "lora", "model.dtype": "bfloat16",
}}  # fmt: skip
ASSUMPTIONS = (
    f"{PER_MACHINE} {DEVICE} a machine, NVLink inside, 400 Gbit/s between machines, links at 80 % of nominal; "
    "2,048 tokens and 8 samples a step for each device (weak scaling); float32 weights of the 7B, bfloat16 of the 70B; "
    "checkpointing; no failures, no stragglers, no contention with others on the network."
)
SETTINGS = {
    "model.name_or_path": "tiny-llama",
    "adapter.method": "none",
    "data.max_length": 64,
    "data.max_rows": 200,
    "training.max_steps": 12,
    "training.per_device_train_batch_size": 2,
    "evaluation.split": "none",
    "hardware.device": "cpu",
}
MICRO_BATCHES = 4

# What a tutorial prints beside what is estimated here. Its setting is the one it names; the rest is not said there.
TUTORIAL = (
    ("DDP, 7B, per GPU", 38e9, "ddp"),
    ("ZeRO-2, 7B, per GPU", 22e9, "zero2"),
    ("ZeRO-3, 7B, per GPU", 15e9, "zero3"),
)
TUTORIAL_VERDICT = (
    "ZeRO-2 at 22 GB is what full fine-tuning in pure 16 bits takes. DDP at 38 GB cannot stand beside it: 16-bit "
    "weights, gradients and both moments alone are 4 x 13.5 = 54 GB, with float32 moments 81 GB. LoRA could take 38, "
    "but then ZeRO-2 could not save 16: LoRA's gradients and state are under 1 GB. ZeRO-3 on 8 devices saves seven "
    "eighths of the weights and pays for gathered layers: less than 15 GB. "
    "Tensor parallelism 15 % ahead of pipeline on 8 A100 is right at one number of micro-batches and wrong at others: "
    "the bubble is 7/(m+7) of the step, 47 % at 8 micro-batches and 10 % at 64; sums of activations are the same."
)


def curve(changes: dict[str, Any], counts: tuple[int, ...] = COUNTS) -> list[LayoutTable]:
    """Return the table of layouts for each number of devices, work per device kept."""
    device, tables = find_device(DEVICE), []
    for count in counts:
        recipe = Recipe().with_changes(
            {
                **BASE,
                **changes,
                "sharding.num_processes": count,
                "sharding.num_machines": max(1, count // PER_MACHINE),
                "sharding.machine_network": "400gbit",
            }
        )
        # Stages of 16 and products over more than a machine are left out: they never win and cost the most to trace.
        layouts = [item for item in list_layouts(count, min(count, PER_MACHINE)) if item.pipeline_parallel <= 8]
        tables.append(estimate_layouts(recipe, device, num_devices=count, layouts=layouts))
    return tables


def tutorial_rows() -> list[dict[str, Any]]:
    """Return the tutorial's figures beside the estimate of full fine-tuning and of LoRA, 8 devices, 512 tokens."""
    device, rows = find_device(DEVICE), []
    for name, printed, kind in TUTORIAL:
        row: dict[str, Any] = {"name": name, "printed_bytes": printed}
        for method in ("none", "lora"):
            changes = {**BASE, "model.name_or_path": "llama-2-7b", "adapter.method": method, "data.max_length": 512}
            recipe = Recipe().with_changes({**changes, "model.dtype": "bfloat16"})
            layout = Layout(kind, 8, shard_size=1 if kind == "ddp" else 8)
            found = estimate_layouts(recipe, device, num_devices=8, layouts=[layout]).rows[0]
            row[f"estimated_{method}_bytes"] = found.memory.process_bytes if found.memory else None
        rows.append(row)
    return rows


# Peak allocated GiB of rank 0 on A100-80GB, Mistral-7B, 4,096 tokens, checkpointing, foreach AdamW, PyTorch's FSDP
# FULL_SHARD under transformers before 4.45, which kept one more float32 copy of the logits.
# Source: foundation-model-stack/fms-acceleration, scripts/benchmarks/refs (rows M0112, M0415, M0136 to M0428 of the
# collection of measured runs): (method, devices, samples a device, dtype of the weights, peak).
PUBLISHED = (
    ("none", 2, 2, "bfloat16", 33.74),
    ("none", 4, 4, "float32", 33.74),
    ("lora", 2, 2, "bfloat16", 14.11),
    ("lora", 2, 4, "bfloat16", 20.45),
    ("lora", 4, 4, "bfloat16", 16.34),
    ("lora", 2, 8, "bfloat16", 31.77),
    ("lora", 4, 8, "bfloat16", 28.34),
)


PUBLISHED_VERDICT = (
    "Of these runs FSDP1 cut the weights, here FSDP2 is modelled. The float32 run left mixed precision to FSDP; the "
    "workbench's autocast keeps 16-bit copies of the gathered weights through forward, and the estimate counts them."
)


def published_rows() -> list[dict[str, Any]]:
    """Return measured peaks of sharded runs beside their estimates; nothing was fitted to them."""
    device, rows = find_device(DEVICE), []
    for method, count, batch, dtype, measured in PUBLISHED:
        recipe = Recipe().with_changes(
            {
                **BASE,
                "model.name_or_path": "mistral-7b-v0.1",
                "model.dtype": dtype,
                "adapter.method": method,
                "adapter.target_modules": ("q_proj", "k_proj", "v_proj", "o_proj"),
                "adapter.autocast_adapter_dtype": False,
                "data.max_length": 4096,
                "training.optim": "adamw_torch",
                "training.mixed_precision": "no" if dtype == "bfloat16" else "bf16",
                "training.per_device_train_batch_size": batch,
                "training.gradient_accumulation_steps": 1,
            }
        )
        layout = Layout("fsdp", count, shard_size=count)
        found = estimate_layouts(recipe, device, num_devices=count, layouts=[layout], script=OLD_TRAINER).rows[0]
        estimated = found.memory.peak_allocated_bytes / GIB if found.memory else float("nan")
        name = f"{'all weights' if method == 'none' else 'LoRA'}, {count} devices, batch {batch}, {dtype}"
        rows.append({"name": name, "measured_gib": measured, "estimated_gib": estimated,
                     "error": estimated / measured - 1})  # fmt: skip
    return rows


def measure(num_processes: int, folder: Path) -> dict[str, Any]:
    """Run the same small job on so many processes of this machine."""
    from workbench.observe.history import History
    from workbench.scale import launch_run

    changes = {**SETTINGS, "training.gradient_accumulation_steps": MICRO_BATCHES // num_processes}
    began = time.perf_counter()
    run_dir = folder / f"by-{num_processes}"
    launch_run(
        Recipe().with_changes(changes), run_dir=run_dir, num_processes=num_processes,
        environment={"OMP_NUM_THREADS": "1"},
    ).wait(600)  # fmt: skip
    history = History.from_folder(run_dir)
    steps = sorted(history.column("step_s")[2:].tolist())
    return {
        "num_processes": num_processes,
        "step_s": steps[len(steps) // 2],
        "loss": float(history.column("loss")[-1]),
        "wall_s": time.perf_counter() - began,
        "checkpoint": str(sorted((run_dir / "checkpoints").iterdir())[-1]),
    }


def compare_weights(rows: list[dict[str, Any]]) -> None:
    """Add to each row the largest difference of its weights from those of the first."""
    from safetensors.torch import load_file

    first = load_file(Path(rows[0]["checkpoint"]) / "model.safetensors")
    for row in rows:
        weights = load_file(Path(row.pop("checkpoint")) / "model.safetensors")
        row["weight_difference"] = max(float((weights[name] - first[name]).abs().max()) for name in first)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, help="write the cost curve as a page")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2], help="run here on so many; none: skip")
    options = parser.parse_args()
    torch.set_num_threads(1)
    curves = {name: curve(changes) for name, changes in CURVES.items()}
    eight = curves["7B, all weights"][3]
    tutorial, published = tutorial_rows(), published_rows()
    measured: list[dict[str, Any]] = []
    if options.processes:
        with tempfile.TemporaryDirectory() as folder:
            measured = [measure(count, Path(folder)) for count in options.processes]
            compare_weights(measured)
    if options.plot:
        import plotly.graph_objects as go

        go.Figure(curve_figure(curves, ASSUMPTIONS)).write_html(options.plot, include_plotlyjs="cdn")
    if options.json:
        values = {name: [table.to_dict() for table in tables] for name, tables in curves.items()}
        print(json.dumps({"curves": values, "assumptions": ASSUMPTIONS, "tutorial": tutorial, "published": published,
                          "tutorial_verdict": TUTORIAL_VERDICT, "measured": measured}))  # fmt: skip
        return
    print("Layouts of a 7B model, all weights\n\n" + render_layouts(eight))
    for name, tables in curves.items():
        print(f"\nCost curve: {name}\n\n{render_curve(tables)}")
    print(f"\nAssumed: {ASSUMPTIONS}\n\nA tutorial's figures (8 devices, 512 tokens)\n")
    cells = [
        (row["name"], *(format_bytes(row[key]) for key in
                        ("printed_bytes", "estimated_none_bytes", "estimated_lora_bytes")))
        for row in tutorial
    ]  # fmt: skip
    print(render_table(("figure", "printed", "all weights", "LoRA"), cells) + f"\n\n{TUTORIAL_VERDICT}")
    print("\nPublished peaks of sharded runs (allocated, GiB)\n")
    shown = [(row["name"], f"{row['measured_gib']:.2f}", f"{row['estimated_gib']:.2f}", f"{row['error']:+.1%}")
             for row in published]  # fmt: skip
    print(render_table(("run", "measured", "estimated", "error"), shown) + f"\n\n{PUBLISHED_VERDICT}")
    if measured:
        rows = [
            (str(row["num_processes"]), f"{row['step_s'] * 1e3:.0f} ms", f"{row['loss']:.6f}",
             f"{row['weight_difference']:.1e}") for row in measured
        ]  # fmt: skip
        header = ("processes", "step", "last loss", "weights differ by")
        print("\nMeasured here: tiny-llama on this machine's CPUs over gloo, 8 samples a step\n")
        print(render_table(header, rows))


if __name__ == "__main__":
    main()
