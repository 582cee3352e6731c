"""Does what is predicted to fit fit, and does the rest not? Random recipes on a CPU that pretends to be a small GPU.

Run: ``python -m benchmarks.emulation [--runs 60] [--seed 0] [--json]``, about ten seconds a run on one core.

Each run draws an architecture and settings, asks the estimate for the run's memory, and then trains two steps with
real tensors on emulated cards. One has the predicted peak of reserved memory and MARGIN to spare: the run must finish.
One lacks MARGIN of the predicted peak of allocated memory, below which no allocator can serve the run: it must raise
``torch.OutOfMemoryError``. Printed are counts of agreement and each disagreement with its figures; returns 1 when there
is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import sys
from typing import Any

from benchmarks.steps import Configuration

# Share of the predicted need that a card has to spare, or lacks.
MARGIN = 0.08
# Blocks are carved from segments of 20 MiB: below this much, what is reserved is not known better.
SEGMENT_BYTES = 20 * 2**20
NUM_STEPS = 2

_BASE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "dtype": "float32",
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "model_type": "llama", "num_key_value_heads": 2},
    "qwen2": {**_BASE, "model_type": "qwen2", "tie_word_embeddings": True},
    "gemma2": {**_BASE, "model_type": "gemma2", "head_dim": 32},
    "phi": {**_BASE, "model_type": "phi"},
    "gpt_neox": {**_BASE, "model_type": "gpt_neox"},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 4096, "dtype": "float32",
        "bos_token_id": 0, "eos_token_id": 1, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
}  # fmt: skip
CHOICES: dict[str, tuple[Any, ...]] = {
    "adapter.method": ("lora", "none"),
    "adapter.r": (4, 16, 64),
    "adapter.use_dora": (False, False, False, True),
    "training.gradient_checkpointing": (False, True),
    "training.gradient_accumulation_steps": (1, 1, 3),
    "training.optim": ("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "adafactor", "sgd"),
    "training.loss_type": ("nll", "chunked_nll"),
    "training.max_grad_norm": (0.0, 1.0),
    "hardware.expandable_segments": (False, True),
}


def draw(seed: int) -> Configuration:
    """Return the run of a seed: the same on every machine."""
    chance = random.Random(seed)
    name = chance.choice(sorted(ARCHITECTURES))
    changes = {field: chance.choice(values) for field, values in CHOICES.items()}
    if changes["adapter.method"] == "none":
        changes = {field: value for field, value in changes.items() if not field.startswith("adapter.")} | {
            "adapter.method": "none"
        }
    return Configuration(
        f"{seed} {name}", ARCHITECTURES[name], changes, chance.choice((2, 4)), chance.choice((64, 128))
    )


def card(capacity_bytes: int) -> Any:
    """Return a card of this capacity; what the driver takes is not the allocator's, and left out."""
    from workbench.hardware import find_device

    return dataclasses.replace(find_device("Tesla T4"), capacity_bytes=capacity_bytes, context_bytes=0)


def predicted_peaks(item: Configuration) -> tuple[int, int]:
    """Return the predicted peaks of allocated and reserved memory in bytes, on a card without a limit."""
    from workbench.estimate import estimate_run

    memory = estimate_run(item.recipe(), card(2**40), shape=item.shape()).memory
    return int(memory.peak_allocated_bytes), int(memory.peak_reserved_bytes)


def survives(item: Configuration, capacity_bytes: int) -> tuple[bool, int]:
    """Train two steps on an emulated card; returns whether they finished, and the highest reserved bytes."""
    import torch

    from benchmarks.steps import Steps
    from workbench.hardware import read_device
    from workbench.observe.emulated import EmulatedDevice

    recipe = item.recipe()
    emulated = EmulatedDevice(card(capacity_bytes), expandable_segments=recipe.hardware.expandable_segments)
    finished = False
    try:
        with emulated:
            steps = Steps(recipe, read_device("cpu"), "cpu")
            emulated.adopt([*steps.model.parameters(), *steps.model.buffers()])
            steps.run(NUM_STEPS)
        finished = True
    except torch.OutOfMemoryError:
        pass
    finally:
        emulated.is_on = False
        emulated.close()
        gc.collect()
    return finished, emulated.stats().peak_reserved


def grade(seed: int) -> list[dict[str, Any]]:
    """Return what was predicted and what happened on the card with room and on the one without."""
    item = draw(seed)
    allocated, reserved_peak = predicted_peaks(item)
    enough = reserved_peak + max(round(MARGIN * reserved_peak), SEGMENT_BYTES)
    rows = []
    for expected, capacity in ((True, enough), (False, round((1 - MARGIN) * allocated))):
        finished, reserved = survives(item, capacity)
        rows.append(
            {
                "name": item.name,
                "changes": item.changes,
                "predicted_bytes": reserved_peak if expected else allocated,
                "capacity_bytes": capacity,
                "expected_to_finish": expected,
                "finished": finished,
                "reserved_bytes": reserved,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print the counts and the disagreements; return 1 when there is one."""
    parser = argparse.ArgumentParser(prog="benchmarks.emulation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=60, help="random recipes (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    rows = [row for seed in range(options.seed, options.seed + options.runs) for row in grade(seed)]
    wrong = [row for row in rows if row["finished"] != row["expected_to_finish"]]
    if options.json:
        print(json.dumps(rows))
        return 1 if wrong else 0
    for expected, text in ((True, "predicted to fit and finished"), (False, "predicted not to fit and ran out")):
        chosen = [row for row in rows if row["expected_to_finish"] == expected]
        print(f"{text}: {sum(row['finished'] == expected for row in chosen)} of {len(chosen)}")
    for row in wrong:
        keys = ("predicted_bytes", "capacity_bytes", "reserved_bytes")
        predicted, capacity, reserved = (row[key] / 2**20 for key in keys)
        outcome = "finished" if row["finished"] else "ran out of memory"
        figures = f"{outcome} on {capacity:.0f} MiB, predicted {predicted:.0f}, reserved {reserved:.0f}"
        print(f"  {row['name']}: {figures}: {row['changes']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
