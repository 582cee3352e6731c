"""What can be done with a whole run folder that has ended: give it another name, or delete it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ..errors import RunFolderError
from .lock import FolderLock
from .run_folder import RECIPE, explain_write_errors

# What every file system takes, and no path.
_NAME = re.compile(r"[^\\/:*?\"<>|\x00-\x1f]{1,120}")
# Deleting goes through a name that is no run, so that a half-deleted folder is never listed as one.
_DOOMED = ".deleting-"


def rename_run(run_dir: str | Path, name: str) -> Path:
    """Give a run's folder another name, beside where it lies; return its new path.

    Args:
        run_dir: The run's folder.
        name: The new name: no path, up to 120 characters.

    Raises:
        RunFolderError: It is no run folder, is in use, or the name is taken or not allowed.
    """
    folder = _require_ended(run_dir)
    wanted = name.strip()
    if not _NAME.fullmatch(wanted) or wanted.startswith(".") or wanted.endswith("."):
        raise RunFolderError(
            f"{name!r} cannot be a folder's name. Give up to 120 characters without / \\ : * ? \" < > |, "
            "and no dot at either end."
        )
    target = folder.with_name(wanted)
    if wanted == folder.name:
        return folder
    if target.exists():
        raise RunFolderError(f"{target} exists already. Give another name.")
    with explain_write_errors(folder):
        folder.rename(target)
    return target


def delete_run(run_dir: str | Path) -> int:
    """Delete a run's folder with everything in it; return the bytes that became free.

    Raises:
        RunFolderError: It is no run folder, is in use, or cannot be deleted.
    """
    folder = _require_ended(run_dir)
    num_bytes = folder_bytes(folder)
    with explain_write_errors(folder):
        doomed = folder.with_name(f"{_DOOMED}{folder.name}")
        if doomed.exists():
            shutil.rmtree(doomed)
        folder.rename(doomed)
        shutil.rmtree(doomed)
    return num_bytes


def folder_bytes(folder: str | Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file() and not file.is_symlink())


def _require_ended(run_dir: str | Path) -> Path:
    folder = Path(run_dir)
    if not (folder / RECIPE).is_file():
        raise RunFolderError(f"{folder} is no run folder: it has no {RECIPE}. Give a folder that a run has written.")
    if folder.is_symlink():
        raise RunFolderError(f"{folder} is a link to {folder.resolve()}. Give that folder itself.")
    if FolderLock.is_held(folder):
        raise RunFolderError(f"{folder} is in use by a run. Stop that run first.")
    return folder
