"""What single bad rows do to the loss, and what ``policies.on_spike`` mends: ``python -m benchmarks.long_tail``.

Of ``python-docs``, 5 % of the rows become noise. The same batches in the same order are trained with each policy. The
raw, unweighted loss of every step counts, that of steps whose update was left out too. Beside it stands the figure
without the dropped steps, which flatters a policy that drops what is hard.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.components import python_docs
from workbench.errors import WorkbenchError
from workbench.events import Event
from workbench.pipeline import start_session
from workbench.recipe import Recipe
from workbench.train.spikes import MIN_STEPS

NOISE_FRACTION = 0.05
NUM_ROWS = 800
POLICIES = ("keep", "skip", "damp")


class Steps:
    """An Observer that keeps losses and spikes."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.spikes: list[dict[str, Any]] = []

    def on_event(self, event: Event) -> None:
        """Take one event."""
        if event.kind == "step":
            self.losses.append(float(event.data["loss"]))
        elif event.kind == "spike":
            self.spikes.append(dict(event.data))


def write_rows(path: Path) -> int:
    """Write the long-tailed set; return how many of its rows are noise."""
    draw = random.Random(0)
    lines = python_docs.prepare().read_text(encoding="utf-8").splitlines()[:NUM_ROWS]
    noisy = set(draw.sample(range(len(lines)), round(NOISE_FRACTION * len(lines))))
    with path.open("w", encoding="utf-8") as file:
        for number, line in enumerate(lines):
            text = json.loads(line)["messages"][1]["content"]
            if number in noisy:
                text = "".join(draw.choices(string.printable, k=len(text)))
            file.write(json.dumps({"text": text}) + "\n")
    return len(noisy)


def fluctuation(losses: Sequence[float]) -> float:
    """Return the standard deviation around the trend, the line through the losses by least squares."""
    slope, base = statistics.linear_regression(range(len(losses)), losses)
    return statistics.pstdev([loss - base - slope * step for step, loss in enumerate(losses)])


def measure(rows: Path, policy: str, num_steps: int) -> dict[str, Any]:
    """Return the figures of one run."""
    recipe = Recipe().with_changes(
        {
            "model.name_or_path": "tiny-llama", "data.name_or_path": str(rows), "data.max_length": 64,
            "adapter.method": "none", "hardware.device": "cpu", "evaluation.max_rows": 40, "evaluation.eval_steps": 0,
            "training.per_device_train_batch_size": 2, "training.gradient_accumulation_steps": 1,
            "training.max_steps": num_steps, "training.learning_rate": 3e-3, "training.save_steps": 0,
            "policies.on_spike": policy, "policies.spike_factor": 3.0,
        }
    )  # fmt: skip
    seen = Steps()
    with tempfile.TemporaryDirectory() as folder:
        session = start_session(recipe, run_dir=Path(folder) / "run", observers=[seen]).wait()
        held_out = session.history.last("eval_loss")
    judged = {spike["step"] for spike in seen.spikes}
    half = max(MIN_STEPS, num_steps // 2)  # The first half falls too steeply for a line.
    later = list(enumerate(seen.losses, 1))[half:]
    left_out = judged if policy == "skip" else set()
    return {
        "policy": policy,
        "std_all_steps": fluctuation([loss for _, loss in later]),
        "std_without_dropped": fluctuation([loss for step, loss in later if step not in left_out]),
        "num_spikes": len(judged),
        "num_dropped_rows": sum(len(spike["rows"]) for spike in seen.spikes if policy == "skip"),
        "eval_loss": held_out,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all policies on the same batches and print their figures and ratios to ``keep``."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            num_noisy = write_rows(path)
            results = [measure(path, policy, options.steps) for policy in POLICIES]
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{num_noisy} of {NUM_ROWS} rows are noise; {options.steps} steps of 2 rows, the later half counted")
    print("policy  std, all steps  ratio  std without dropped  ratio  spikes  dropped rows  held-out loss")
    plain = results[0]
    for one in results:
        whole, kept = one["std_all_steps"], one["std_without_dropped"]
        print(
            f"{one['policy']:6}  {whole:14.4f}  {whole / plain['std_all_steps']:5.3f}  {kept:19.4f}  "
            f"{kept / plain['std_all_steps']:5.3f}  {one['num_spikes']:6}  {one['num_dropped_rows']:12}  "
            f"{one['eval_loss']:13.4f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
