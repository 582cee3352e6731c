"""export_run: a run folder in, a folder for elsewhere out. Written beside its final name and moved there when whole."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ExportError
from ..events import Cancel, ProgressCallback
from ..recipe import Recipe
from ..train.lock import LOCK_NAME, FolderLock
from ..train.run_folder import explain_write_errors, find_checkpoint, read_recipe_of, summarise_run, sync_tree
from .card import render_card
from .formats import FORMATS, WEIGHT_BITS
from .stages import begin_stage

RESULTS = ("adapter", "model")
WITHOUT_CARD = ("script", "report")


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        format: One of ``FORMATS``.
        path: The folder.
        num_bytes: Bytes in it.
        checks: What was found when it was read back, ``{what: value}``.
        grade: Against the merged model, the fields of ``grade.Grade``; None where there is nothing to grade.
    """

    format: str
    path: Path
    num_bytes: int
    checks: dict[str, Any] = field(default_factory=dict)
    grade: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "format": self.format,
            "path": str(self.path),
            "num_bytes": self.num_bytes,
            "checks": self.checks,
            "grade": self.grade,
        }


@dataclass(frozen=True)
class Job:
    """One export in the making.

    Attributes:
        recipe: The run's settings.
        folder: The run's folder; nothing is written there but the export.
        to: The format.
        target: The temporary folder that becomes the export.
        progress: Told about the stage ``"export"``.
        cancel: Looked at between the stages.
    """

    recipe: Recipe
    folder: Path
    to: str
    target: Path
    progress: ProgressCallback | None = None
    cancel: Cancel | None = None

    def begin_stage(self, done: int, message: str) -> None:
        """Tell how many of the stages are done and what comes now.

        Raises:
            Cancelled: The user cancelled.
        """
        begin_stage(self.progress, self.cancel, done, message)


Written = tuple[dict[str, Any], dict[str, Any] | None]  # checks, grade


def export_run(
    run_dir: str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> ExportReport:
    """Export the result of a run.

    Args:
        run_dir: A run's folder.
        to: One of ``FORMATS``.
        out: Folder to make; None makes ``exports/FORMAT`` in the run's folder.
        progress: Told about the stage ``"export"``.
        cancel: Looked at between the stages.

    Raises:
        ExportError: An unknown format, nothing to export yet, the target exists, the format cannot hold this model, or
            what was read back is not what was written.
        MissingPackageError: The format needs a package that is not installed.
        RunFolderError: ``run_dir`` is no run folder, or the target cannot be written.
        Cancelled: The user cancelled; nothing half-written stays.
    """
    if to not in FORMATS:
        raise ExportError(f"{to!r} is no export format; there are {', '.join(FORMATS)}.")
    folder = Path(run_dir)
    recipe = read_recipe_of(folder)
    target = Path(out) if out is not None else folder / "exports" / to
    if target.exists():
        raise ExportError(f"{target} exists already. Give another folder with --out, or delete it first.")
    begin_stage(progress, cancel, 0, f"Exporting to {to}")
    with _written(target) as temporary:
        job = Job(recipe, folder, to, temporary, progress, cancel)
        checks, grade = _WRITERS[to](job)
        if to not in WITHOUT_CARD:
            card = render_card(recipe, summarise_run(folder), to, grade)
            (temporary / "README.md").write_text(card, encoding="utf-8")
        if checks or grade:
            found = {"format": to, **checks} | ({"grade": grade} if grade else {})
            (temporary / "export.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        job.begin_stage(4, f"Moving to {target}")
    num_bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return ExportReport(to, target, num_bytes, checks, grade)


def find_result(folder: Path) -> Path:
    """Return the trained weights of a run: its result, or its last checkpoint's where it has not ended.

    Raises:
        ExportError: The run has saved nothing.
    """
    for name in RESULTS:
        if (folder / name).is_dir():
            return folder / name
    with contextlib.suppress(Exception):
        checkpoint = find_checkpoint(folder)[1]
        for name in RESULTS:
            if (checkpoint / name).is_dir():
                return checkpoint / name
    raise ExportError(f"{folder} has no trained weights yet. Let the run end, or stop and save it, then export.")


@contextlib.contextmanager
def _written(target: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``target`` when the block succeeds, and vanishes when it does not.

    What a killed process left behind bears another name than an export, and the next one to the same place removes it.

    Raises:
        ExportError: Another process is writing the same export.
    """
    temporary = target.with_name(f".{target.name}.partial")
    with explain_write_errors(target):
        if FolderLock.is_held(temporary):
            raise ExportError(
                f"Another process is writing {target} now. Wait for it, or give another folder with --out."
            )
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        lock = FolderLock.acquire(temporary)
        try:
            yield temporary
            (temporary / LOCK_NAME).unlink()
            sync_tree(temporary)
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            lock.release()


def _write_adapter(job: Job) -> Written:
    result = find_result(job.folder)
    if result.name != "adapter":
        raise ExportError(f"{job.folder} trained every weight: it has no adapter. Export it as merged.")
    shutil.copytree(result, job.target, dirs_exist_ok=True)
    return {}, None


def _write_script(job: Job) -> Written:
    from .script import write_script

    write_script(job.recipe, job.target, progress=job.progress, cancel=job.cancel)
    return {}, None


def _write_report(job: Job) -> Written:
    from .page import write_page

    write_page(job.recipe, job.folder, job.target)
    return {}, None


def _write_weights(job: Job) -> Written:
    from .weights import write_weights

    return write_weights(job.recipe, find_result(job.folder), job)


_WRITERS: dict[str, Callable[[Job], Written]] = {
    "adapter": _write_adapter,
    "script": _write_script,
    "report": _write_report,
    **dict.fromkeys(WEIGHT_BITS, _write_weights),
}
