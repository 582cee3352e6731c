"""export_run: a run folder in, a folder for elsewhere out. Written beside its final name and moved there when whole."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ExportError
from ..events import Cancel, ProgressCallback
from ..recipe import Recipe
from ..train.run_folder import explain_write_errors, find_checkpoint, read_recipe_of, summarise_run
from .card import render_card
from .formats import FORMATS
from .stages import begin_stage

RESULTS = ("adapter", "model")


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        format: One of ``FORMATS``.
        path: The folder.
        num_bytes: Bytes in it.
        checks: What was found when it was read back, ``{what: value}``.
    """

    format: str
    path: Path
    num_bytes: int
    checks: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"format": self.format, "path": str(self.path), "num_bytes": self.num_bytes, "checks": self.checks}


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
        ExportError: An unknown format, nothing to export yet, or the target exists.
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
        checks = _WRITERS[to](recipe, folder, temporary, progress, cancel)
        if to != "script":
            (temporary / "README.md").write_text(render_card(recipe, summarise_run(folder), to), encoding="utf-8")
        if checks:
            (temporary / "export.json").write_text(json.dumps({"format": to, **checks}, indent=1), encoding="utf-8")
        begin_stage(progress, cancel, 2, f"Moving to {target}")
    num_bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return ExportReport(to, target, num_bytes, checks)


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
    """Yield a folder that becomes ``target`` when the block succeeds, and vanishes when it does not."""
    temporary = target.with_name(f".{target.name}.partial")
    with explain_write_errors(target):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _write_adapter(
    recipe: Recipe, folder: Path, target: Path, progress: ProgressCallback | None, cancel: Cancel | None
) -> dict[str, Any]:
    result = find_result(folder)
    if result.name != "adapter":
        raise ExportError(f"{folder} trained every weight: it has no adapter. Export it as merged.")
    shutil.copytree(result, target, dirs_exist_ok=True)
    return {}


def _write_merged(
    recipe: Recipe, folder: Path, target: Path, progress: ProgressCallback | None, cancel: Cancel | None
) -> dict[str, Any]:
    from .merged import write_merged

    return write_merged(recipe, find_result(folder), target, progress=progress, cancel=cancel)


def _write_script(
    recipe: Recipe, folder: Path, target: Path, progress: ProgressCallback | None, cancel: Cancel | None
) -> dict[str, Any]:
    from .script import write_script

    write_script(recipe, target, progress=progress, cancel=cancel)
    return {}


_WRITERS = {"adapter": _write_adapter, "merged": _write_merged, "script": _write_script}
