"""One run on several processes over gloo: the same numbers, a resume on fewer, a rank that hangs, a stop for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from workbench.observe.history import History
from workbench.pipeline import start_session
from workbench.recipe import Recipe
from workbench.scale import launch_run
from workbench.scale.launch import await_checkpoint
from workbench.train.run_folder import list_checkpoints, summarise_run

pytestmark = pytest.mark.slow
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Micro-batches of one step over all processes.
MICRO_BATCHES = 4


def recipe_for(num_processes: int, **changes: object) -> Recipe:
    """Return a run of full fine-tuning in float32 with samples of unequal length."""
    settings = {
        "model.name_or_path": "tiny-llama",
        "adapter.method": "none",
        "data.max_length": 64,
        "data.max_rows": 200,
        "training.max_steps": 5,
        "training.per_device_train_batch_size": 2,
        "training.gradient_accumulation_steps": MICRO_BATCHES // num_processes,
        "training.save_steps": 3,
        "training.save_total_limit": 5,
        "evaluation.max_rows": 7,
        "hardware.device": "cpu",
    }
    return Recipe().with_changes(settings | {name.replace("__", "."): value for name, value in changes.items()})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of the same run in this process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    start_session(recipe_for(1), run_dir=folder).wait(120)
    return folder


def largest_difference(first: Path, second: Path) -> float:
    """Return the largest difference of weights and optimizer state between two checkpoints."""
    weights, others = (load_file(path / "model.safetensors") for path in (first, second))
    states = [torch.load(path / "optimizer.pt")["state"] for path in (first, second)]
    assert weights.keys() == others.keys() and states[0].keys() == states[1].keys()
    found = [float((weights[name] - others[name]).abs().max()) for name in weights]
    for index, state in states[0].items():
        found += [float((value - states[1][index][name]).abs().max()) for name, value in state.items()]
    return max(found)


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of the same run on two processes, started by accelerate."""
    folder = tmp_path_factory.mktemp("two") / "run"
    launch_run(recipe_for(2), "accelerate", run_dir=folder, num_processes=2, environment=ONE_THREAD).wait(300)
    return folder


def test_two_processes_learn_what_one_learns(alone: Path, by_two: Path) -> None:
    assert largest_difference(list_checkpoints(alone)[-1], list_checkpoints(by_two)[-1]) < 1e-5
    mine, other = (History.from_folder(folder) for folder in (alone, by_two))
    assert list(other.column("step")) == [1, 2, 3, 4, 5]
    assert other.column("loss") == pytest.approx(mine.column("loss"), abs=1e-5)
    assert other.column("grad_norm") == pytest.approx(mine.column("grad_norm"), abs=1e-4)
    assert list(other.column("num_supervised_tokens")) == list(mine.column("num_supervised_tokens"))
    assert other.column("eval_loss")[-1] == pytest.approx(mine.column("eval_loss")[-1], abs=1e-5)


def test_each_rank_leaves_its_own_rows_and_only_the_main_one_saves(by_two: Path) -> None:
    other = by_two / "ranks" / "rank-0001"
    assert summarise_run(by_two).state == summarise_run(other).state == "done"
    assert len(History.from_folder(other)) == 5
    assert not (other / "checkpoints").exists() and not (other / "model").exists()
    assert (by_two / "model" / "model.safetensors").is_file()


def test_saved_by_two_goes_on_with_one(alone: Path, by_two: Path, tmp_path: Path) -> None:
    middle = next(path for path in list_checkpoints(by_two) if path.name == "step-000003")
    recipe = Recipe.from_yaml(by_two / "recipe.yaml")
    assert recipe.sharding.num_processes == 2
    session = start_session(recipe, resume_from=middle, run_dir=tmp_path / "on").wait(120)
    assert session.recipe.sharding.num_processes == 1
    assert session.recipe.training.gradient_accumulation_steps == MICRO_BATCHES
    assert largest_difference(list_checkpoints(alone)[-1], list_checkpoints(tmp_path / "on")[-1]) < 1e-5


def test_a_rank_that_hangs_is_named_with_its_line(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = recipe_for(2, sharding__timeout_s=5, sharding__num_processes=2, evaluation__split="none")
    (tmp_path / "recipe.yaml").write_text(settings.to_yaml())
    script = Path(__file__).with_name("hanging_rank.py")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [*start, "train", str(tmp_path / "recipe.yaml"), "--out", str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **ONE_THREAD},
    )
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert any("rank 1 did not arrive: still at step 2" in line and "1 of 2 ranks wait" in line for line in said)
    assert any("hanging_rank.py" in line and "the line that the message has to name" in line for line in said)
    assert "failed" in {summarise_run(folder).state, summarise_run(folder / "ranks" / "rank-0001").state}


def test_a_stop_reaches_all_ranks_at_the_same_step_and_is_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = recipe_for(2, training__max_steps=5000, training__save_steps=2, evaluation__split="none")
    launched = launch_run(settings, run_dir=folder, num_processes=2, environment=ONE_THREAD)
    try:
        await_checkpoint(folder, step=2, timeout_s=120)
        launched.stop(timeout_s=60)
        assert not launched.is_live
    finally:
        launched.end()
    states = [summarise_run(path) for path in (folder, folder / "ranks" / "rank-0001")]
    assert [state.state for state in states] == ["stopped", "stopped"]
    assert states[0].num_steps_done == states[1].num_steps_done
    last = list_checkpoints(folder)[-1]
    assert last.name == f"step-{states[0].num_steps_done:06d}" and (folder / "model").is_dir()


@pytest.mark.skipif(
    not os.environ.get("WORKBENCH_LONG_TESTS"),
    reason="takes minutes: the engine restarts all workers, at times twice; set WORKBENCH_LONG_TESTS=1",
)
def test_a_worker_that_is_killed_comes_back_and_the_run_ends_equal(tmp_path: Path) -> None:
    steps = {"training__max_steps": 60, "training__save_steps": 4, "evaluation__split": "none"}
    whole = tmp_path / "whole"
    start_session(recipe_for(1, **steps), run_dir=whole).wait(120)
    folder = tmp_path / "run"
    launched = launch_run(recipe_for(2, **steps), run_dir=folder, num_processes=2, environment=ONE_THREAD)
    try:
        reached = await_checkpoint(folder, step=4, timeout_s=120)
        workers = psutil.Process(launched.process.pid).children(recursive=True)
        victim = next(worker for worker in workers if worker.environ().get("RANK") == "1")
        victim.kill()
        launched.wait(300)
    finally:
        launched.end()
    assert reached.name != "step-000060", "the run was over before its worker was killed"
    assert list_checkpoints(folder)[-1].name == "step-000060"
    assert largest_difference(list_checkpoints(whole)[-1], list_checkpoints(folder)[-1]) < 1e-5
    starts = [line for line in (folder / "events.jsonl").read_text().splitlines() if '"preparing"' in line]
    assert len(starts) >= 2
