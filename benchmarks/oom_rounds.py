"""Twenty times out of memory and on again, in one process under an emulated T4.

``python -m benchmarks.oom_rounds`` runs a small model on a "Tesla T4" with reduced memory until it is full, applies one
change with ``continue_with`` and lets the run end. After each round the bytes of all live tensors must be what they
were before it, and the trained weights those of a run that had the fitting settings from its start: equal to the bit
where the change does the same arithmetic, else equal up to the rounding of sums in another order.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from workbench.errors import RunError
from workbench.observe.graph_nodes import live_tensors
from workbench.observe.meters import heap_reader
from workbench.pipeline import start_session
from workbench.recipe import Recipe
from workbench.units import format_bytes

LONG, NUM_ROWS = 400, 108  # words of a long row; rows in all, of which every eighteenth is long

# Sums over 4 + 4 rows round otherwise than over 8, and Adam divides each gradient by its own size: where a gradient is
# nearly nothing, the rounding moves a weight by about the learning rate (2e-4 of weights around 0.1) in each step.
TOLERANCE = 5e-3

# Libraries keep a few constants from their first use on; the model alone has 1.3 MiB.
MAX_KEPT_BYTES = 1024

# The estimates' caches and the interpreter's own tables grow in the first rounds.
MAX_HEAP_GROWTH = 2**20


@dataclass(frozen=True)
class Kind:
    """One way to run out of memory and to go on.

    Attributes:
        settings: Changes of the base settings that do not fit.
        remedy: What is applied; None takes the first remedy that the finding offers.
        is_exact: Whether the same arithmetic is done, so that weights are equal to the bit.
    """

    settings: Mapping[str, Any]
    remedy: Mapping[str, Any] | None
    is_exact: bool


BASE: dict[str, Any] = {
    "model.name_or_path": "tiny-llama",
    "data.max_length": 256,
    "data.format": "text",
    "training.max_steps": 7,
    "training.per_device_train_batch_size": 8,
    "training.gradient_accumulation_steps": 1,
    "training.save_steps": 0,
    "evaluation.max_rows": 8,
    "evaluation.eval_steps": 3,
    "hardware.device": "cpu",
    "hardware.emulate": "Tesla T4:225MiB",
}

KINDS = {
    "longest batch, checkpointing": Kind(
        {"adapter.lora_dropout": 0.1}, {"training.gradient_checkpointing": True}, is_exact=True
    ),
    "longest batch, smaller micro-batch": Kind(
        {}, {"training.per_device_train_batch_size": 4, "training.gradient_accumulation_steps": 2}, is_exact=False
    ),
    "evaluation, smaller evaluation batch": Kind(
        {
            "training.per_device_train_batch_size": 1,
            "evaluation.per_device_eval_batch_size": 64,
            "evaluation.max_rows": 64,
            "hardware.emulate": "Tesla T4:181MiB",
            "adapter.lora_dropout": 0.1,
        },
        {"evaluation.per_device_eval_batch_size": 1},
        is_exact=True,
    ),
    "longest batch, the first remedy offered": Kind({}, None, is_exact=False),
}


@dataclass(frozen=True)
class Round:
    """What one round gave.

    Attributes:
        kind: Key of KINDS.
        cause: Cause that the finding names.
        phase, step: Where the run ran out.
        num_tries: Times it was continued.
        changes: What was applied in all.
        weight_difference: Norm of the difference to the run that fitted from its start, over the norm of its weights.
        tensor_bytes: Bytes of live tensors after the round, less those before it.
        heap_bytes: Heap in use after the round.
        seconds: Wall-clock time, the run it is compared with left out.
    """

    kind: str
    cause: str
    phase: str
    step: int
    num_tries: int
    changes: dict[str, Any]
    weight_difference: float
    tensor_bytes: int
    heap_bytes: int
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether weights and memory are as they should be."""
        most = 0.0 if KINDS[self.kind].is_exact else TOLERANCE
        return self.weight_difference <= most and self.tensor_bytes <= MAX_KEPT_BYTES


def write_rows(path: Path, *, all_long: bool = False) -> Path:
    """Write short rows with a few long ones among them."""
    rows = [
        {
            "text": " ".join(
                f"word{(7 * row + place) % 89}" for place in range(LONG if all_long or row % 18 == 9 else 14)
            )
        }
        for row in range(NUM_ROWS)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def tensor_bytes() -> int:
    """Return the bytes of all storages that live tensors have."""
    gc.collect()
    storages = {}
    for tensor in live_tensors():
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def trained_weights(session: Any) -> dict[str, torch.Tensor]:
    """Return the adapter that a run has saved."""
    return load_file(session.result_dir / "adapter_model.safetensors")


def play_round(number: int, folder: Path) -> Round:
    """Run out of memory, go on, and compare."""
    name = list(KINDS)[number % len(KINDS)]
    kind = KINDS[name]
    rows = write_rows(folder / f"{number}.jsonl", all_long="evaluation" in name)
    settings = {**BASE, **kind.settings, "data.name_or_path": str(rows), "training.seed": 42 + number}
    recipe = Recipe().with_changes(settings)
    before, began = tensor_bytes(), time.perf_counter()
    session = start_session(recipe, run_dir=folder / f"run-{number}")
    first, changes, tries = None, {}, 0
    while True:
        try:
            session.wait()
            break
        except RunError:
            finding = next(one for one in reversed(session.findings) if one.kind == "oom")
            first = first or finding
            if tries >= 4:
                raise
        tries += 1
        applied = dict(kind.remedy if kind.remedy is not None else session.remedies()[0].changes)
        changes |= applied
        session = session.continue_with(applied)
    if first is None:
        raise SystemExit(f"round {number} ({name}) did not run out of memory: its capacity is too large.")
    found, seconds = trained_weights(session), time.perf_counter() - began
    phase, step = str(first.where["phase"]), int(first.where["step"])
    cause, session, finding, first = first.cause, None, None, None  # A session keeps its history, not its tensors.
    fitting = start_session(recipe.with_changes(changes), run_dir=folder / f"fitting-{number}").wait()
    difference = relative_difference(found, trained_weights(fitting))
    del found, fitting
    return Round(
        name, cause, phase, step, tries, changes, difference, tensor_bytes() - before, (heap_reader() or int)(), seconds
    )


def relative_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference over the norm; infinite where the names differ."""
    if one.keys() != other.keys():
        return float("inf")
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return (apart / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5


def play(num_rounds: int) -> list[Round]:
    """Play all rounds in this process."""
    with tempfile.TemporaryDirectory() as folder:
        return [play_round(number, Path(folder)) for number in range(num_rounds)]


def heap_growth(rounds: list[Round]) -> float:
    """Return bytes of the heap per round over the second half."""
    half = [entry.heap_bytes for entry in rounds[len(rounds) // 2 :]]
    return (half[-1] - half[0]) / max(1, len(half) - 1)


def main() -> int:
    """Print the rounds and return 1 where one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = play(options.rounds)
    growth = heap_growth(rounds)
    good = sum(entry.is_good for entry in rounds)
    if options.json:
        print(json.dumps({"rounds": [asdict(entry) for entry in rounds], "num_good": good, "heap_growth": growth}))
    else:
        for number, entry in enumerate(rounds):
            print(
                f"{number + 1:3d}  {entry.kind:42s} {entry.cause:20s} {entry.phase:10s} step {entry.step}  continued "
                f"{entry.num_tries}x  weights differ {entry.weight_difference:.1e}  tensors left "
                f"{format_bytes(entry.tensor_bytes)}  {entry.seconds:.1f} s"
            )
        print(f"{good} of {len(rounds)} rounds: memory back and weights as from the start.")
        print(
            f"Heap in use in the second half: {format_bytes(abs(growth))} {'more' if growth > 0 else 'less'} per round."
        )
    return 0 if good == len(rounds) and growth < MAX_HEAP_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
