"""The engines' own files are what the engines read, and what an engine cannot do is refused before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from workbench.cli.main import main
from workbench.errors import MissingPackageError, RecipeError, RunError, RunFolderError
from workbench.estimate.sharded_tape import DEEPSPEED_BUCKET_ELEMENTS
from workbench.hardware import find_device, read_device
from workbench.recipe import Recipe
from workbench.scale import plan_launch
from workbench.scale.launch import launch_run, prepare_launch, request_stop
from workbench.train.ranks import Ranks, for_ranks, read_ranks

CPU, A100 = read_device("cpu"), find_device("A100-SXM4-80GB")


def recipe_of(**changes: object) -> Recipe:
    return Recipe().with_changes({name.replace("__", "."): value for name, value in changes.items()})


def plan_of(engine: str, device=CPU, *, starts: bool = True, machine_rank: int = 0, **changes: object):
    recipe = recipe_of(sharding__num_processes=4, **changes)
    return plan_launch(recipe, engine, Path("/runs/one"), device, starts=starts, machine_rank=machine_rank)


def test_accelerate_reads_its_file(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "accelerate.yaml"
    path.write_text(plan_of("accelerate").files["accelerate.yaml"])
    config = load_config_from_file(str(path))
    assert config.num_processes == 4 and config.num_machines == 1 and config.mixed_precision == "no"
    plan = plan_of("accelerate", A100, starts=False, sharding__layout="hybrid", sharding__num_machines=2)
    path.write_text(plan.files["accelerate.yaml"])
    config = load_config_from_file(str(path))
    assert config.distributed_type.value == "FSDP" and config.fsdp_config["fsdp_version"] == 2
    parallel = yaml.safe_load(path.read_text())["parallelism_config"]
    assert parallel["parallelism_config_dp_replicate_size"] == parallel["parallelism_config_dp_shard_size"] == 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_file_says_what_the_estimate_counts(stage: int) -> None:
    plan = plan_of("deepspeed", A100, starts=False, sharding__layout=f"zero{stage}")
    values = json.loads(plan.files["deepspeed.json"])
    zero = values["zero_optimization"]
    assert zero["stage"] == stage and zero["reduce_bucket_size"] == DEEPSPEED_BUCKET_ELEMENTS
    batch, accumulation = values["train_micro_batch_size_per_gpu"], values["gradient_accumulation_steps"]
    assert values["train_batch_size"] == batch * accumulation * 4  # DeepSpeed refuses anything else
    assert ("stage3_prefetch_bucket_size" in zero) == (stage == 3)
    assert not plan.is_startable


def test_the_ray_job_is_python_and_the_cloud_task_is_spot_with_recovery() -> None:
    files = plan_of("torchrun", A100, starts=False, sharding__num_machines=2).files
    compile(files["ray_job.py"], "ray_job.py", "exec")
    assert "num_workers=4, use_gpu=True" in files["ray_job.py"] and "--continue" in files["ray_job.py"]
    task = yaml.safe_load(files["skypilot.yaml"])
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "A100:2"
    assert task["resources"]["use_spot"] and task["resources"]["job_recovery"]["strategy"] == "FAILOVER"
    assert "--node-rank=$SKYPILOT_NODE_RANK" in task["run"] and "--continue" in task["run"]


def test_the_command_of_a_second_machine_names_its_rank_and_the_main_one() -> None:
    command = " ".join(plan_of("torchrun", sharding__num_machines=2, machine_rank=1).command)
    assert "--nproc-per-node=2" in command and "--nnodes=2 --node-rank=1 --master-addr=$MAIN" in command
    assert re.search(r"train \S*recipe.yaml --out /runs/one --continue$", command)
    assert "--standalone" in " ".join(plan_of("torchrun").command)


@pytest.mark.parametrize(
    ("engine", "device", "changes", "seen", "fix"),
    [
        ("accelerate", CPU, {"sharding__layout": "fsdp"}, "into DDP without a word", ("sharding.layout", "ddp")),
        ("torchrun", A100, {"sharding__layout": "zero2"}, "is DeepSpeed's", ("sharding.layout", "ddp")),
        ("deepspeed", A100, {}, "zero1, zero2 and zero3, not ddp", ("sharding.layout", "zero2")),
        ("torchrun", CPU, {"training__loss_type": "chunked_nll"}, "not averaged", ("training.loss_type", "nll")),
        (
            "torchrun",
            CPU,
            {"sharding__tensor_parallel_size": 2},
            "estimated only",
            ("sharding.tensor_parallel_size", 1),
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_what_works(engine, device, changes, seen, fix) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_of(engine, device, **changes)
    problem = next(item for item in caught.value.problems if seen in item.message)
    assert fix in problem.fix
    fixed = recipe_of(sharding__num_processes=4, **changes).with_changes(dict(problem.fix))
    plan_launch(fixed, engine, Path("/runs/one"), device)


def test_a_missing_engine_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'workbench\[ray\]'"):
        plan_of("ray")


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    folder, _ = prepare_launch(recipe_of(), "torchrun", run_dir=tmp_path, num_processes=2, device=CPU)
    assert (folder / "launch" / "accelerate.yaml").is_file()
    assert Recipe.from_yaml(folder / "recipe.yaml").sharding.num_processes == 2
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunFolderError, match="already holds a run"):
        prepare_launch(recipe_of(), "torchrun", run_dir=tmp_path, device=CPU)
    with pytest.raises(RunError, match="nothing to run"):
        launch_run(None)
    request_stop(tmp_path)
    assert (tmp_path / "ranks" / "stop").exists()


def test_the_command_line_writes_files_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["launch", "--engine", "ray", "--num-processes", "2", "--out", str(tmp_path), "--write-only", "--json"]
    assert main(options) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"accelerate.yaml", "ray_job.py", "skypilot.yaml", "start.sh"} == set(shown["files"])
    assert not (tmp_path / "launch" / "engine.log").exists()


def test_another_number_of_processes_keeps_the_samples_of_a_step() -> None:
    recipe = recipe_of(sharding__num_processes=4, training__gradient_accumulation_steps=2)
    alone = for_ranks(recipe, 1)
    assert alone.training.gradient_accumulation_steps == 8 and alone.sharding.num_processes == 1
    with pytest.raises(RecipeError, match="8 micro-batches, which 3 processes cannot share equally"):
        for_ranks(recipe, 3)


def test_a_launcher_says_which_process_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert read_ranks() == Ranks(0, 1, 0)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(RunError, match="RANK is 3 and WORLD_SIZE 1"):
        read_ranks()
    monkeypatch.setenv("WORLD_SIZE", "4")
    ranks = read_ranks()
    assert not ranks.is_main and ranks.folder(Path("run")) == Path("run/ranks/rank-0003")


def test_several_processes_asked_for_in_one_are_not_started_as_one(tmp_path: Path) -> None:
    from workbench.train.session import Session

    with pytest.raises(RecipeError, match="2 processes are asked for, and 1 started"):
        Session(recipe_of(sharding__num_processes=2, hardware__device="cpu"), run_dir=tmp_path / "run").start()
