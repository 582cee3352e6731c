"""Time from a changed setting to a new estimate, in one process with the imports done.

``python -m benchmarks.estimate_speed [--json] [--runs N] [--model NAME ...]``. Nothing is read from disk. Four cases:

* cold: a model that no estimate has seen, its modules built and traced;
* settled: a toggle of a panel whose effects were computed in the background, as they are after every change;
* unsettled: a toggle before that, on a batch shape that no trace has seen: the worst case;
* effects: every toggle's marginal effect, as the panel computes them in the background.

Wall-clock and CPU seconds are printed; on a busy machine only the latter mean something. The bounds hold for CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MODELS = ("llama-3.1-8b", "smollm2-135m-instruct")
# Seconds. The first model bears the bounds.
BOUNDS = {"cold": 1.5, "settled_p95": 0.1}
TOGGLES: dict[str, tuple[Any, ...]] = {
    "training.gradient_checkpointing": (True, False),
    "data.packing": (True, False),
    "adapter.r": (8, 32, 16),
    "quantization.load_in_4bit": (True, False),
    "training.optim": ("adamw_torch", "adamw_bnb_8bit", "adamw_torch_fused"),
    "training.per_device_train_batch_size": (1, 4, 8),
    "data.max_length": (257, 1025, 385),
    "training.mixed_precision": ("no", "auto"),
    "training.loss_type": ("chunked_nll", "nll"),
    "adapter.method": ("none", "lora"),
    "model.attn_implementation": ("eager", "sdpa"),
}
Pair = tuple[float, float]


def timed(work: Callable[[], Any]) -> Pair:
    """Return wall-clock and CPU seconds of this thread."""
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - wall, time.thread_time() - cpu


def measure(model: str, device_name: str, runs: int) -> dict[str, Any]:
    """Return the times of one model: pairs of wall-clock and CPU seconds."""
    from workbench.estimate import clear_caches, estimate_run
    from workbench.hardware import find_device
    from workbench.recipe import Recipe

    device = find_device(device_name)
    recipe = Recipe().with_changes({"model.name_or_path": model})
    cold: list[Pair] = []
    estimate_run(recipe, device)  # imports the model's code, and PEFT
    for _ in range(runs):
        clear_caches()
        cold.append(timed(lambda: estimate_run(recipe, device)))
    clear_caches()
    estimate_run(recipe, device)
    changes: list[dict[str, Any]] = []
    effects = timed(lambda: changes.extend(_effects(recipe, device)))
    settled = [timed(lambda change=change: estimate_run(recipe.with_changes(change), device)) for change in changes]
    unsettled: dict[str, list[Pair]] = {}
    length = 500
    for field, values in TOGGLES.items():
        for value in values * runs:
            length += 1
            changed = recipe.with_changes({"data.max_length": length, field: value})
            unsettled.setdefault(field, []).append(timed(lambda changed=changed: estimate_run(changed, device)))
    return {
        "model": model, "device": device_name, "cold": cold, "settled": settled, "unsettled": unsettled,
        "effects": effects, "num_effects": len(changes),
    }  # fmt: skip


def _effects(recipe: Any, device: Any) -> list[dict[str, Any]]:
    """Estimate every other value of every toggle; return the changes that can be estimated."""
    from workbench.errors import EstimateError, ModelError, RecipeError
    from workbench.estimate import estimate_run
    from workbench.plan import other_values
    from workbench.recipe import iter_fields

    known = []
    for info in iter_fields():
        for value in other_values(info, recipe) if info.toggle else ():
            try:
                estimate_run(recipe.with_changes({info.path: value}), device)
                known.append({info.path: value})
            except (RecipeError, EstimateError, ModelError):  # the rules forbid it, or it cannot be traced
                continue
    return known


def percentiles(pairs: list[Pair]) -> dict[str, float]:
    """Return median and p95, wall-clock and CPU, in seconds."""
    walls, cpus = zip(*pairs, strict=True)
    return {
        "wall_p50_s": float(np.percentile(walls, 50)),
        "wall_p95_s": float(np.percentile(walls, 95)),
        "cpu_p50_s": float(np.percentile(cpus, 50)),
        "cpu_p95_s": float(np.percentile(cpus, 95)),
    }


def summarise(row: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that are printed."""
    every = [pair for pairs in row["unsettled"].values() for pair in pairs]
    share = 20 / row["num_effects"]
    return {
        "model": row["model"],
        "device": row["device"],
        "cold": percentiles(row["cold"]),
        "settled": percentiles(row["settled"]),
        "unsettled": percentiles(every),
        "unsettled_cpu_s": {field: percentiles(pairs)["cpu_p50_s"] for field, pairs in row["unsettled"].items()},
        "num_effects": row["num_effects"],
        "effects": {"wall_s": row["effects"][0], "cpu_s": row["effects"][1], "cpu_of_20_s": row["effects"][1] * share},
    }


def render(row: dict[str, Any]) -> str:
    """Return the table of one model."""
    lines = [
        f"{row['model']} on {row['device']}",
        f"  {'':<36}{'wall p50':>10}{'wall p95':>10}{'CPU p50':>10}{'CPU p95':>10}",
    ]
    for name, label in (("cold", "cold"), ("settled", "toggle, settled panel"), ("unsettled", "toggle, unseen shape")):
        values = [row[name][key] * 1e3 for key in ("wall_p50_s", "wall_p95_s", "cpu_p50_s", "cpu_p95_s")]
        lines.append(f"  {label:<36}" + "".join(f"{value:>7.0f} ms" for value in values))
    lines += [f"    {field:<44}{seconds * 1e3:>26.0f} ms" for field, seconds in row["unsettled_cpu_s"].items()]
    effects = row["effects"]
    lines.append(
        f"  {row['num_effects']} effects: wall {effects['wall_s']:.2f} s, CPU {effects['cpu_s']:.2f} s, "
        f"20 of them {effects['cpu_of_20_s']:.2f} s"
    )
    return "\n".join(lines)


def main() -> int:
    """Print the tables; return 1 when the first model misses a bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help=f"default: {', '.join(MODELS)}")
    parser.add_argument("--device", default="Tesla T4")
    parser.add_argument("--runs", type=int, default=1, help="repetitions of cold and unsettled estimates")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["WORKBENCH_TRACES"] = ""
    imports = timed(_import)
    compiled = timed(_compile)
    rows = [summarise(measure(model, options.device, options.runs)) for model in options.model or MODELS]
    if options.json:
        print(json.dumps({"imports_s": imports, "allocator_s": compiled, "models": rows}))
    else:
        print(f"imports {imports[1]:.2f} s, allocator core {compiled[1]:.2f} s of CPU")
        print("\n".join(render(row) for row in rows))
    first = rows[0]
    misses = first["cold"]["cpu_p50_s"] > BOUNDS["cold"] or first["settled"]["cpu_p95_s"] > BOUNDS["settled_p95"]
    return 1 if misses else 0


def _import() -> None:
    import torch

    import workbench.estimate.run  # noqa: F401  # transformers, peft

    torch.set_num_threads(1)


def _compile() -> None:
    from workbench.estimate.allocator import CachingAllocator

    CachingAllocator().malloc(1)  # numba; compiled once per machine, then read from its cache


if __name__ == "__main__":
    sys.exit(main())
