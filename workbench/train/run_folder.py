"""RunFolder: everything a run leaves on disk, written so that a crash or a full disk loses nothing that was there.

::

    runs/20260301-101500-smollm2-135m-instruct-3f9a1c/
        recipe.yaml  metrics.jsonl  events.jsonl  findings.jsonl  lock
        checkpoints/step-000100/
        adapter/            (or model/ for full fine-tuning)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RecipeError, RunFolderError, WorkbenchError
from ..events import LIVE_STATES
from ..recipe import Recipe
from .lock import FolderLock

DEFAULT_ROOT = Path("runs")
RECIPE, METRICS, EVENTS, FINDINGS = "recipe.yaml", "metrics.jsonl", "events.jsonl", "findings.jsonl"
CHECKPOINTS = "checkpoints"

_TEMPORARY = ".writing-"
_STEP = re.compile(r"step-(\d+)")
_TAIL_BYTES = 65_536  # Enough for the last rows of a metrics file of any length.


class RunFolder:
    """A run's folder, held by this process until ``release``."""

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, recipe: Recipe, path: str | Path | None = None, *, root: str | Path = DEFAULT_ROOT) -> RunFolder:
        """Make a new run folder, lock it and write ``recipe.yaml``.

        Args:
            recipe: What will run.
            path: The folder; None makes a new one below ``root``.
            root: Where new folders go.

        Raises:
            RunFolderError: The folder holds a run already, is in use, or cannot be written.
        """
        target = Path(path) if path is not None else new_path(recipe, root)
        with explain_write_errors(target):
            target.mkdir(parents=True, exist_ok=True)
            if any((target / name).exists() for name in (METRICS, EVENTS, CHECKPOINTS, "adapter", "model")):
                FolderLock.acquire(target).release()  # A run in progress is the more helpful thing to say.
                raise RunFolderError(
                    f"{target} already holds a run. Give another folder, or continue that run: "
                    f"workbench train --resume {target}"
                )
            folder = cls(target, FolderLock.acquire(target))
        try:
            folder.write_text(RECIPE, recipe.to_yaml())
        except BaseException:
            folder.release()
            raise
        return folder

    @classmethod
    def reopen(cls, path: str | Path) -> RunFolder:
        """Lock an existing run folder to continue its run.

        Raises:
            RunFolderError: It is no run folder, is in use, or cannot be written.
        """
        target = Path(path)
        if not (target / RECIPE).is_file():
            raise RunFolderError(
                f"{target} is no run folder: it has no {RECIPE}. Give a folder that a run has written."
            )
        with explain_write_errors(target):
            folder = cls(target, FolderLock.acquire(target))
            for left_over in [*target.glob(f"{_TEMPORARY}*"), *target.glob(f"{CHECKPOINTS}/{_TEMPORARY}*")]:
                shutil.rmtree(left_over, ignore_errors=True)
        return folder

    def release(self) -> None:
        """Give the folder free; may be called twice."""
        self._lock.release()

    def beat(self) -> None:
        """Tell other processes that this one is alive; cheap, call it at every step."""
        self._lock.beat()

    def write_text(self, name: str, text: str) -> None:
        """Write a small file so that at any moment it holds the old or the new text.

        Raises:
            RunFolderError: The folder cannot be written.
        """
        final = self.path / name
        temporary = final.with_name(f"{_TEMPORARY}{final.name}")
        with explain_write_errors(self.path):
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(final)

    @contextlib.contextmanager
    def write_directory(self, name: str) -> Iterator[Path]:
        """Yield a temporary folder that becomes ``name`` when the block succeeds; until then the old one stays.

        Raises:
            RunFolderError: The folder cannot be written; nothing that was there is lost.
        """
        final = self.path / name
        temporary = final.with_name(f"{_TEMPORARY}{final.name}")
        with explain_write_errors(self.path):
            final.parent.mkdir(exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                yield temporary
                sync_tree(temporary)
                _replace_directory(temporary, final)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

    def remove_old_checkpoints(self, keep: int | None, protect: Path | None = None) -> None:
        """Delete the oldest checkpoints beyond ``keep``; ``protect`` (the best one) stays and does not count."""
        if keep is None:
            return
        for old in [found for found in list_checkpoints(self.path) if found != protect][:-keep]:
            shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run on disk, for lists.

    Attributes:
        name: Name of the folder.
        path: The folder.
        state: Last state; ``"failed"`` where the process ended without saying so.
        num_steps_done: Optimizer steps in ``metrics.jsonl``.
        loss: Last loss, or None.
        eval_loss: Last evaluation loss among the last rows, or None.
        model: ``model.name_or_path``.
        data: ``data.name_or_path``.
        method: ``adapter.method``.
        num_bytes: Bytes on disk.
        started_s: When the folder's Recipe was written, seconds since the epoch.
        num_checkpoints: Checkpoints that can be resumed.
    """

    name: str
    path: Path
    state: str
    num_steps_done: int
    loss: float | None
    eval_loss: float | None
    model: str
    data: str
    method: str
    num_bytes: int
    started_s: float
    num_checkpoints: int


def list_runs(root: str | Path = DEFAULT_ROOT) -> list[RunSummary]:
    """Return the runs directly below ``root``, newest first; folders that are no runs are left out."""
    base = Path(root)
    if not base.is_dir():
        return []
    found = [summarise_run(path) for path in base.iterdir() if (path / RECIPE).is_file()]
    return sorted(found, key=lambda run: run.started_s, reverse=True)


def summarise_run(path: str | Path) -> RunSummary:
    """Return the summary of one run folder."""
    folder = Path(path)
    try:
        recipe = Recipe.from_yaml(folder / RECIPE)
        names = (recipe.model.name_or_path, recipe.data.name_or_path, str(recipe.adapter.method))
    except RecipeError:
        names = ("?", "?", "?")
    rows = _tail(folder / METRICS)
    steps = [row for row in rows if "step" in row]
    return RunSummary(
        name=folder.name,
        path=folder,
        state=_last_state(folder),
        num_steps_done=int(steps[-1]["step"]) if steps else 0,
        loss=_newest(rows, "loss"),
        eval_loss=_newest(rows, "eval_loss"),
        model=names[0],
        data=names[1],
        method=names[2],
        num_bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        started_s=(folder / RECIPE).stat().st_mtime,
        num_checkpoints=len(list_checkpoints(folder)),
    )


def list_checkpoints(path: str | Path) -> list[Path]:
    """Return the finished checkpoints of a run folder, oldest first."""
    folders = [(found, _STEP.fullmatch(found.name)) for found in (Path(path) / CHECKPOINTS).glob("step-*")]
    numbered = [(int(match.group(1)), found) for found, match in folders if match and found.is_dir()]
    return [found for _, found in sorted(numbered)]


def find_checkpoint(path: str | Path) -> tuple[Path, Path]:
    """Return ``(run folder, checkpoint)`` for a run folder (its last checkpoint) or one of its checkpoints.

    Raises:
        RunFolderError: There is no checkpoint there.
    """
    given = Path(path)
    if _STEP.fullmatch(given.name) and (given.parent.parent / RECIPE).is_file() and given.is_dir():
        return given.parent.parent, given
    if not (given / RECIPE).is_file():
        raise RunFolderError(f"{given} is no run folder: it has no {RECIPE}. Give a folder that a run has written.")
    found = list_checkpoints(given)
    if not found:
        raise RunFolderError(
            f"{given} has no checkpoint to continue from. Start it anew: "
            f"workbench train {given / RECIPE} --out NEW_FOLDER"
        )
    return given, found[-1]


def read_recipe_of(path: str | Path) -> Recipe:
    """Return the Recipe of a run folder, or of the run that a checkpoint belongs to.

    Raises:
        RunFolderError: It is no run folder.
        RecipeError: Its Recipe is damaged.
    """
    for folder in (Path(path), Path(path).parent.parent):
        if (folder / RECIPE).is_file():
            return Recipe.from_yaml(folder / RECIPE)
    raise RunFolderError(f"{path} is no run folder: it has no {RECIPE}. Give a folder that a run has written.")


def new_path(recipe: Recipe, root: str | Path = DEFAULT_ROOT) -> Path:
    """Return a path below ``root`` that does not exist: time, model and digest."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe.model.name_or_path.rstrip("/").rsplit("/", 1)[-1])[:48].strip("-.")
    base = Path(root) / f"{time.strftime('%Y%m%d-%H%M%S')}-{model or 'model'}-{recipe.digest()[:6]}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn what the system and the libraries raise while writing into one sentence.

    Raises:
        RunFolderError: The folder is read-only, full or otherwise not writable.
    """
    try:
        yield
    except WorkbenchError:
        raise
    except Exception as error:
        if not _is_write_error(error):
            raise
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
        raise RunFolderError(
            f"{path} cannot be written ({reason}). What was saved before is unharmed; "
            "free some space or give another folder."
        ) from error


def _is_write_error(error: Exception) -> bool:
    # safetensors and torch.save report a full disk in exceptions of their own.
    is_library = type(error).__name__ == "SafetensorError" or (
        isinstance(error, RuntimeError) and ("PytorchStreamWriter" in str(error) or "iostream" in str(error))
    )
    return isinstance(error, OSError) or is_library


def sync_tree(folder: Path) -> None:
    """Ask the system to put every file below ``folder`` on the disk before it gets its final name."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_file() or (path.is_dir() and os.name == "posix"):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _replace_directory(temporary: Path, final: Path) -> None:
    old = final.with_name(f"{_TEMPORARY}old-{final.name}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    try:
        temporary.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _tail(path: Path) -> list[dict[str, Any]]:
    """Return the last whole rows of a JSONL file; a half-written last line is left out."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    rows = []
    for line in lines[1:] if size > _TAIL_BYTES else lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def _newest(rows: list[dict[str, Any]], name: str) -> float | None:
    return next((float(row[name]) for row in reversed(rows) if row.get(name) is not None), None)


def _last_state(folder: Path) -> str:
    states = [row["data"]["state"] for row in _tail(folder / EVENTS) if row.get("kind") == "state"]
    if not states:
        return "idle"
    if states[-1] in LIVE_STATES and not FolderLock.is_held(folder):
        return "failed"
    return str(states[-1])
