"""What each engine starts, what it cannot, and the files it needs. Decided before anything starts."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import MissingPackageError, Problem, RecipeError
from ..hardware import Device
from ..recipe import Recipe, require_valid
from . import files

ENGINES = ("torchrun", "accelerate", "deepspeed", "ray")
FOLDER = "launch"


@dataclass(frozen=True)
class Plan:
    """What ``launch`` will do.

    Attributes:
        engine: One of ENGINES.
        recipe: With the number of processes.
        files: ``{name in the run's launch folder: text}``.
        command: What is started on this machine.
        is_startable: False where the engine's files are written and a person starts them on a cluster.
        notes: Sentences a person should know.
    """

    engine: str
    recipe: Recipe
    files: Mapping[str, str]
    command: Sequence[str]
    is_startable: bool
    notes: Sequence[str] = ()


def plan_launch(
    recipe: Recipe, engine: str, run_dir: Path, device: Device, *, machine_rank: int = 0, starts: bool = True
) -> Plan:
    """Return the files and the command of an engine.

    Args:
        recipe: ``sharding`` says how many processes and machines, and the layout.
        engine: One of ENGINES.
        run_dir: The run's folder.
        device: The devices of this machine.
        machine_rank: Which machine this is, 0 for the main one.
        starts: False where only files are wanted, for another machine.

    Raises:
        RecipeError: The engine cannot do what is asked; each problem names the layout that works.
        MissingPackageError: The engine is not installed.
    """
    on_gpu = device.has_caching_allocator
    require_valid(recipe, device.facts(for_estimate=not starts))
    problems = _refusals(recipe, engine, on_gpu=on_gpu, starts=starts)
    if problems:
        raise RecipeError(problems)
    command = _COMMANDS[engine](recipe, run_dir, machine_rank)
    made = {
        "accelerate.yaml": files.accelerate_config(recipe),
        "ray_job.py": files.ray_job(recipe, on_gpu=on_gpu),
        "skypilot.yaml": files.skypilot_task(recipe, _sky_name(device), _sky_command(recipe)),
    }
    if recipe.sharding.layout.startswith("zero"):
        made["deepspeed.json"] = files.deepspeed_config(recipe)
    made["start.sh"] = "#!/bin/sh\n# Run on every machine, with MACHINE_RANK=0 on the main one.\n" + _shell(command)
    notes = []
    several = recipe.sharding.num_machines > 1
    if several:
        notes.append("Start the same command on every machine with its --machine-rank, and the run folder on storage")
        notes[-1] += " that all of them see."
    return Plan(engine, recipe, made, tuple(command), engine != "deepspeed", tuple(notes))


def _refusals(recipe: Recipe, engine: str, *, on_gpu: bool, starts: bool) -> list[Problem]:
    sharding, problems = recipe.sharding, []

    def refuse(field: str, message: str, *fix: tuple[str, object]) -> None:
        problems.append(Problem(field, message, fix))

    if engine not in ENGINES:
        refuse("engine", f"{engine!r} is no engine; allowed is one of {', '.join(ENGINES)}.")
        return problems
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(sharding, name) > 1:
            refuse(f"sharding.{name}", "is estimated only; no engine is started with it.", (f"sharding.{name}", 1))
    layout = sharding.layout
    if layout in ("fsdp", "hybrid") and starts:
        text = f"{layout} is estimated, and --write-only makes its files; the loop here saves whole weights only."
        if not on_gpu:
            text = f"accelerate turns {layout} on a CPU into DDP without a word: each process would hold everything."
        refuse("sharding.layout", text, ("sharding.layout", "ddp"))
    elif layout.startswith("zero") and engine != "deepspeed":
        refuse("sharding.layout", f"{layout} is DeepSpeed's; {engine} does ddp.", ("sharding.layout", "ddp"))
    elif engine == "deepspeed" and not layout.startswith("zero"):
        refuse("sharding.layout", f"deepspeed does zero1, zero2 and zero3, not {layout}.", ("sharding.layout", "zero2"))
    if recipe.training.loss_type == "chunked_nll" and sharding.num_processes > 1:
        text = "chunked_nll calls the parts of the model itself, where gradients are not averaged over processes."
        refuse("training.loss_type", text, ("training.loss_type", "nll"))
    if engine == "ray" and starts and importlib.util.find_spec("ray") is None:
        raise MissingPackageError("ray", "The engine ray", "ray")
    return problems


def _worker(run_dir: Path) -> list[str]:
    return ["train", str(run_dir / "recipe.yaml"), "--out", str(run_dir), "--continue"]


def _torchrun(recipe: Recipe, run_dir: Path, machine_rank: int) -> list[str]:
    sharding = recipe.sharding
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += [f"--nproc-per-node={sharding.num_processes // sharding.num_machines}"]
    command += [f"--max-restarts={files.MAX_RESTARTS}"]
    if sharding.num_machines == 1:
        command += ["--standalone"]
    else:
        command += [f"--nnodes={sharding.num_machines}", f"--node-rank={machine_rank}"]
        command += [f"--master-addr={_MAIN}", f"--master-port={files.PORT}"]
    return [*command, "-m", "workbench.cli.main", *_worker(run_dir)]


def _accelerate(recipe: Recipe, run_dir: Path, machine_rank: int) -> list[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(run_dir / FOLDER / "accelerate.yaml"), "--max_restarts", str(files.MAX_RESTARTS)]
    if recipe.sharding.num_machines > 1:
        command += ["--machine_rank", str(machine_rank), "--main_process_ip", _MAIN]
    else:
        command += ["--main_process_port", "0"]
    return [*command, "-m", "workbench.cli.main", *_worker(run_dir)]


def _deepspeed(recipe: Recipe, run_dir: Path, machine_rank: int) -> list[str]:
    command = ["deepspeed", f"--num_gpus={recipe.sharding.num_processes // recipe.sharding.num_machines}"]
    return [*command, "YOUR_SCRIPT.py", "--deepspeed", str(run_dir / FOLDER / "deepspeed.json")]


def _ray(recipe: Recipe, run_dir: Path, machine_rank: int) -> list[str]:
    return [sys.executable, str(run_dir / FOLDER / "ray_job.py")]


_MAIN = "$MAIN"
_COMMANDS: dict[str, Callable[[Recipe, Path, int], list[str]]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "ray": _ray,
}


def _sky_name(device: Device) -> str:
    """Return the name clouds give a card, e.g. ``"A100"`` for ``"NVIDIA A100-SXM4-80GB"``."""
    words = device.name.replace("NVIDIA", "").replace("Tesla", "").replace("GeForce", "").split()
    return words[0].split("-")[0] if device.has_caching_allocator and words else "A100"


def _sky_command(recipe: Recipe) -> list[str]:
    sharding = recipe.sharding
    command = ["torchrun", f"--nproc-per-node={sharding.num_processes // sharding.num_machines}"]
    command += ["--nnodes=$SKYPILOT_NUM_NODES", "--node-rank=$SKYPILOT_NODE_RANK"]
    command += [f"--master-addr={_MAIN}", f"--master-port={files.PORT}", "-m", "workbench.cli.main"]
    return [*command, "train", "/checkpoints/run/recipe.yaml", "--out", "/checkpoints/run", "--continue"]


def _shell(command: Sequence[str]) -> str:
    return " ".join(word if word.endswith(_MAIN) else shlex.quote(word) for word in command) + "\n"
