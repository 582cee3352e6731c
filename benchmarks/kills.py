"""Kill a run with SIGKILL at random instants, also while it saves, and let it go on: ``python -m benchmarks.kills``.

A run of a small model is killed ``--kills`` times (default 25): half of the times at a random instant, half as soon as
a checkpoint is being written. After each kill it goes on from its folder. Every kill may cost at most the steps since
the last checkpoint, and when the run has ended its losses, adapter, optimizer state and random state must be those of a
run that was never interrupted, bit for bit. A run that ends before all kills are spent is begun anew.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workbench.observe.history import History
from workbench.recipe import Recipe
from workbench.train.run_folder import CHECKPOINTS, list_checkpoints, summarise_run

SAVE_STEPS = 4
NUM_STEPS = 48
# Of the random instants, seconds after the first new step: about as long as two stretches between checkpoints.
LONGEST_WAIT_S = 0.6
START_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        while_saving: Whether a checkpoint was half written.
        steps_recorded: Steps that the killed process had recorded.
        checkpoint: Step of the newest whole checkpoint, 0 for none.
    """

    while_saving: bool
    steps_recorded: int
    checkpoint: int

    @property
    def num_lost(self) -> int:
        """Steps that come again."""
        return max(0, self.steps_recorded - self.checkpoint)


@dataclass(frozen=True)
class Outcome:
    """What all kills came to.

    Attributes:
        kills: In order.
        num_runs: Runs that ended.
        differences: What differs from the uninterrupted run; empty when nothing does.
    """

    kills: tuple[Kill, ...]
    num_runs: int
    differences: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing differs and no kill cost more than the steps since the last checkpoint."""
        return not self.differences and all(kill.num_lost <= SAVE_STEPS for kill in self.kills)


def settings() -> Recipe:
    """Return the run that is killed; with dropout, so that the random state counts."""
    return Recipe().with_changes(
        {
            "model.name_or_path": "tiny-llama",
            "data.max_length": 96,
            "data.max_rows": 150,
            "adapter.lora_dropout": 0.1,
            "training.per_device_train_batch_size": 2,
            "training.gradient_accumulation_steps": 2,
            "training.max_steps": NUM_STEPS,
            "training.save_steps": SAVE_STEPS,
            "evaluation.split": "none",
            "hardware.device": "cpu",
        }
    )


def _train(folder: Path) -> None:
    """Begin or go on with the run in ``folder``; the body of a process that may be killed."""
    import torch

    from workbench.pipeline import start_session

    torch.set_num_threads(1)
    has_checkpoint = bool(list_checkpoints(folder))
    begins_again = (folder / "recipe.yaml").is_file() and not has_checkpoint
    start_session(
        settings(), run_dir=folder, resume_from=folder if has_checkpoint else None, begins_again=begins_again
    ).wait()


def _process(folder: Path) -> Any:
    # Forked from a process that has imported everything: a start costs a second instead of ten.
    process = multiprocessing.get_context("fork").Process(target=_train, args=(folder,))
    process.start()
    return process


def _half_saved(folder: Path) -> set[tuple[str, int]]:
    """Return names and inodes of checkpoints that are being written, or were when the process was killed."""
    try:
        with os.scandir(folder / CHECKPOINTS) as entries:
            return {(entry.name, entry.inode()) for entry in entries if not entry.name.startswith("step-")}
    except OSError:
        return set()


def _kill_once(folder: Path, draw: random.Random, *, while_saving: bool) -> Kill | None:
    """Run until the instant comes and kill; returns None where the run ended before."""
    before = len(History.from_folder(folder))
    process = _process(folder)
    deadline, instant = time.monotonic() + START_TIMEOUT_S, None
    metrics = folder / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.is_file() else 0
    left_behind = _half_saved(folder)  # By a kill before this process.
    while process.is_alive():
        now = time.monotonic()
        if while_saving:
            if _half_saved(folder) - left_behind:
                time.sleep(draw.uniform(0, 0.005))
                break
        elif instant is None and metrics.is_file() and metrics.stat().st_size > size:
            instant = now + draw.uniform(0, LONGEST_WAIT_S)
        elif instant is not None and now >= instant:
            break
        if now > deadline:
            break
        time.sleep(0.001)
    was_alive = process.is_alive()
    if was_alive:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    if not was_alive:
        if process.exitcode:
            raise RuntimeError(f"the run in {folder} failed with exit code {process.exitcode}")
        return None
    found = list_checkpoints(folder)
    steps = History.from_folder(folder).last("step") or before
    checkpoint = int(found[-1].name.removeprefix("step-")) if found else 0
    return Kill(bool(_half_saved(folder) - left_behind), int(steps), checkpoint)


def compare(folder: Path, plain: Path) -> list[str]:
    """Return what differs between two ended runs, bit for bit."""
    import torch

    differences = []
    if summarise_run(folder).state != "done":
        return [f"the run ended as {summarise_run(folder).state}"]
    ours, theirs = History.from_folder(folder), History.from_folder(plain)
    for column in ("step", "loss", "grad_norm", "learning_rate", "num_tokens"):
        if ours.column(column).tolist() != theirs.column(column).tolist():
            differences.append(f"column {column}")
    weights = "adapter/adapter_model.safetensors"
    if (folder / weights).read_bytes() != (plain / weights).read_bytes():
        differences.append(weights)
    last = list_checkpoints(plain)[-1].relative_to(plain)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        one, other = (torch.load(root / last / name, weights_only=False) for root in (folder, plain))
        if not _equal(one, other):
            differences.append(name)
    return differences


def _equal(one: Any, other: Any) -> bool:
    import numpy
    import torch

    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return bool(numpy.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def play(num_kills: int, seed: int, root: Path) -> Outcome:
    """Kill, go on and compare below ``root``."""
    # Before the first fork, and nothing is computed here: a fork of running threads would hang.
    import peft  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401

    draw = random.Random(seed)
    plain = root / "plain"
    process = _process(plain)
    process.join()
    kills: list[Kill] = []
    differences: list[str] = []
    num_runs = 0
    folder = root / "run"
    while True:
        if len(kills) < num_kills:
            kill = _kill_once(folder, draw, while_saving=len(kills) % 2 == 1)
            if kill is not None:
                kills.append(kill)
                continue
        else:
            process = _process(folder)
            process.join()
        num_runs += 1
        differences += compare(folder, plain)
        if len(kills) >= num_kills:
            return Outcome(tuple(kills), num_runs, tuple(differences))
        shutil.rmtree(folder)


def main(argv: list[str] | None = None) -> int:
    """Print what the kills came to; return 1 where a run differs or lost too much."""
    parser = argparse.ArgumentParser(prog="benchmarks.kills", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        outcome = play(options.kills, options.seed, Path(folder))
    saving = sum(kill.while_saving for kill in outcome.kills)
    lost = max(kill.num_lost for kill in outcome.kills)
    if options.json:
        print(json.dumps(asdict(outcome)))
    else:
        print(
            f"{len(outcome.kills)} kills, {saving} of them while a checkpoint was half written; at most {lost} steps "
            f"came again, checkpoints every {SAVE_STEPS}. {outcome.num_runs} runs ended, "
            f"{'all equal to the uninterrupted one' if not outcome.differences else outcome.differences}."
        )
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
