"""Start an engine as a process of its own, watch the run folder it writes, stop it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from ..errors import RunError, RunFolderError
from ..hardware import Device, read_device, target_device
from ..recipe import Recipe
from ..train.ranks import RANK_FOLDERS, STOP_FILE, for_ranks
from ..train.run_folder import (
    CHECKPOINTS,
    METRICS,
    RECIPE,
    RunSummary,
    list_checkpoints,
    new_path,
    read_recipe_of,
    summarise_run,
)
from .engines import FOLDER, Plan, plan_launch

LOG = "engine.log"
# A step that is running is finished and saved before a launcher is ended by force.
_STOP_WAIT_S = 120.0
_LOG_LINES = 25


class Launched:
    """A run in processes of its own. The run folder says how it goes; any process can read it.

    Attributes:
        run_dir: The run's folder.
        plan: What was started.
        process: The engine's launcher.
    """

    def __init__(self, run_dir: Path, plan: Plan, process: subprocess.Popen[bytes]) -> None:
        self.run_dir, self.plan, self.process = run_dir, plan, process

    @property
    def is_live(self) -> bool:
        """Whether the engine runs."""
        return self.process.poll() is None

    def summary(self) -> RunSummary:
        """Return where the run stands, read from its folder."""
        return summarise_run(self.run_dir)

    def wait(self, timeout_s: float | None = None) -> Launched:
        """Wait until the engine has ended.

        Raises:
            RunError: It failed; the message has the last lines of its log.
            subprocess.TimeoutExpired: It still runs.
        """
        code = self.process.wait(timeout_s)
        if code and self.summary().state != "stopped":
            raise RunError(f"{self.plan.engine} ended with code {code}. {self.last_words()}")
        return self

    def stop(self, timeout_s: float = _STOP_WAIT_S) -> None:
        """Stop all ranks at the same step and save; end the engine by force where that takes too long."""
        request_stop(self.run_dir)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()

    def end(self) -> None:
        """End the engine and its workers at once."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(5)
                return
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue

    def last_words(self) -> str:
        """Return what the ranks said when they failed, or the end of the log."""
        try:
            lines = (self.run_dir / FOLDER / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        said = [line for line in lines if line.startswith("rank ")]
        return "\n".join(dict.fromkeys(said[-4:])) or "\n".join(lines[-_LOG_LINES:])


def write_files(plan: Plan, run_dir: Path) -> Path:
    """Write an engine's files and the Recipe into the run folder; return the folder of the files.

    Raises:
        RunFolderError: The folder cannot be written.
    """
    folder = run_dir / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in plan.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        (run_dir / RECIPE).write_text(plan.recipe.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{run_dir} cannot be written ({error.strerror}). Give another folder.") from error
    return folder


def launch_run(
    recipe: Recipe | None,
    engine: str = "torchrun",
    *,
    run_dir: str | Path | None = None,
    resume_from: str | Path | None = None,
    num_processes: int | None = None,
    machine_rank: int = 0,
    device: Device | None = None,
    environment: dict[str, str] | None = None,
) -> Launched:
    """Start a run on several processes and return at once.

    Args:
        recipe: The settings; None with ``resume_from``, whose Recipe goes on.
        engine: ``"torchrun"``, ``"accelerate"`` or ``"ray"``.
        run_dir: The run's folder; None makes a new one below ``./runs``.
        resume_from: A run folder to continue, with as many or other processes; samples per step stay the same.
        num_processes: Overrides ``sharding.num_processes``.
        machine_rank: Which machine this is.
        device: The devices of this machine; None reads it.
        environment: Variables added to the engine's.

    Raises:
        RecipeError: The engine cannot do what is asked.
        RunFolderError: The folder holds another run, or cannot be written.
        RunError: The engine only has its files written, and is started by a person.

    Example:
        >>> launched = launch_run(Recipe(), num_processes=2)   # doctest: +SKIP
        >>> launched.wait().summary().state                     # doctest: +SKIP
        'done'
    """
    folder, plan = prepare_launch(
        recipe, engine, run_dir=run_dir, resume_from=resume_from, num_processes=num_processes,
        machine_rank=machine_rank, device=device, starts=True,
    )  # fmt: skip
    if not plan.is_startable:
        raise RunError(
            f"{plan.engine} is started by a person: its files are in {folder / FOLDER}. "
            "Give --engine torchrun or accelerate to start here."
        )
    (folder / RANK_FOLDERS).mkdir(exist_ok=True)
    (folder / RANK_FOLDERS / STOP_FILE).unlink(missing_ok=True)
    command = [word.replace("$MAIN", os.environ.get("MAIN", socket.gethostname())) for word in plan.command]
    with open(folder / FOLDER / LOG, "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Its own group: the kernel's or terminal's interrupts are not its own.
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": _threads(plan), **(environment or {})},
        )
    return Launched(folder, plan, process)


def prepare_launch(
    recipe: Recipe | None,
    engine: str,
    *,
    run_dir: str | Path | None = None,
    resume_from: str | Path | None = None,
    num_processes: int | None = None,
    machine_rank: int = 0,
    device: Device | None = None,
    starts: bool = False,
) -> tuple[Path, Plan]:
    """Write an engine's files and start nothing; see ``launch_run``.

    Returns:
        The run folder and what would be started.
    """
    if resume_from is not None:
        folder = Path(resume_from)
        before = read_recipe_of(folder)
        wanted = for_ranks(before, num_processes or before.sharding.num_processes)
    else:
        if recipe is None:
            raise RunError("There is nothing to run. Give a Recipe, or a run folder to continue.")
        wanted = recipe
        if num_processes is not None:
            wanted = recipe.with_changes({"sharding.num_processes": num_processes})
        folder = Path(run_dir) if run_dir is not None else new_path(wanted)
        if any((folder / name).exists() for name in (METRICS, CHECKPOINTS)):
            raise RunFolderError(f"{folder} already holds a run. Give another folder, or --resume {folder}.")
    if device is None:
        device = read_device(wanted.hardware.device) if starts else target_device(wanted)
    plan = plan_launch(wanted, engine, folder, device, machine_rank=machine_rank, starts=starts)
    write_files(plan, folder)
    return folder, plan


def request_stop(run_dir: str | Path) -> None:
    """Ask the ranks of a run to stop at the end of their step and save; works from any machine that sees the folder."""
    path = Path(run_dir) / RANK_FOLDERS / STOP_FILE
    path.parent.mkdir(exist_ok=True)
    path.touch()


def await_checkpoint(run_dir: str | Path, step: int = 1, timeout_s: float = 600.0) -> Path:
    """Wait until a run has a checkpoint of at least ``step`` and return it.

    Raises:
        TimeoutError: It has none after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = list_checkpoints(run_dir)
        if found and int(found[-1].name.removeprefix("step-")) >= step:
            return found[-1]
        time.sleep(0.1)
    raise TimeoutError(f"{run_dir} has no checkpoint of step {step} after {timeout_s:g} s.")


def _threads(plan: Plan) -> str:
    """Return the threads of each process: the cores shared by the processes of this machine."""
    sharding = plan.recipe.sharding
    per_machine: Any = sharding.num_processes // sharding.num_machines
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // per_machine))
