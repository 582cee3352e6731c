"""The newest whole checkpoint of an fsspec URL becomes a run folder that goes on as if it had never been away."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import Problem, RecipeError, RunFolderError
from ..events import Progress, ProgressCallback
from ..recipe import Recipe, credentials_in
from .ranks import read_ranks
from .run_folder import CHECKPOINTS, RECIPE, explain_write_errors, new_path
from .upload import MANIFEST, RUN_FILES, TRAINER_STATE, best_checkpoint_name, open_store

_LOG = logging.getLogger(__name__)
_CHUNK_BYTES = 4 * 1024 * 1024


class _NotWhole(Exception):  # noqa: N818  # Not an error: the next older upload is tried.
    """An upload is not what its manifest says."""


@dataclass(frozen=True)
class _Upload:
    """An uploaded checkpoint with a readable manifest."""

    store: Any
    path: str
    created_s: float
    files: dict[str, dict[str, Any]]

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    def fetch(self, name: str, target: Path) -> None:
        """Download one file and compare it with the manifest.

        Raises:
            _NotWhole: It is not there or is another one.
        """
        digest, num_bytes = hashlib.sha256(), 0
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.store.open(f"{self.path}/{name}", "rb") as source, open(target, "wb") as file:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    num_bytes += len(chunk)
                    file.write(chunk)
        except FileNotFoundError as error:
            raise _NotWhole(f"{self.name}/{name} is missing") from error
        expected = self.files[name]
        if (num_bytes, digest.hexdigest()) != (expected["num_bytes"], expected["sha256"]):
            raise _NotWhole(f"{self.name}/{name} is not what was uploaded ({num_bytes} bytes)")

    def fetch_checkpoint(self, folder: Path) -> None:
        for name in self.files:
            if not name.startswith(f"{RUN_FILES}/"):
                self.fetch(name, folder / CHECKPOINTS / self.name / name)


def fetch_run(url: str, run_dir: str | Path | None = None, *, progress: ProgressCallback | None = None) -> Path:
    """Make a run folder from the newest whole checkpoint that ``training.upload_to`` has left at a URL.

    Args:
        url: What ``upload_to`` was, or the folder of one run below it.
        run_dir: The new run folder; None makes one below ``./runs``.
        progress: Told of each file.

    Returns:
        The run folder, with the checkpoint, the recipe and the rows of its steps.

    Raises:
        RunFolderError: Nothing whole is there, or the folder exists or cannot be written.
        RecipeError: The URL holds credentials, or no installed package can open it.
    """
    problem = credentials_in(url)
    if problem:
        raise RecipeError([Problem("resume_from", problem)])
    if read_ranks().size > 1:
        raise RunFolderError("Several processes cannot fetch one run. Fetch it with one: workbench train --resume URL.")
    uploads = _find_uploads(url)
    reasons = []
    for upload in uploads:
        try:
            return _fetch(upload, uploads, run_dir, progress or (lambda told: None))
        except _NotWhole as reason:
            reasons.append(str(reason))
            _LOG.warning("%s; looking for an older checkpoint.", reason)
    seen = f" ({'; '.join(reasons)})" if reasons else ""
    raise RunFolderError(
        f"{url} holds no whole checkpoint to continue from{seen}. Give what training.upload_to was when the run was "
        "made, or the folder of one run below it."
    )


def _find_uploads(url: str) -> list[_Upload]:
    """Return the uploaded checkpoints, the newest first."""
    store, root = open_store(url)
    store.invalidate_cache()
    found = []
    for pattern in (f"{root}/{CHECKPOINTS}/*/{MANIFEST}", f"{root}/*/{CHECKPOINTS}/*/{MANIFEST}"):
        for path in store.glob(pattern):
            try:
                manifest = json.loads(store.cat_file(path))
                files = {str(name): dict(facts) for name, facts in manifest["files"].items()}
                created_s = float(manifest["created_s"])
            except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError) as error:
                _LOG.warning("%s cannot be read (%s) and is left out.", path, error)
                continue
            if all(_stays_inside(name) for name in files):
                found.append(_Upload(store, path.rsplit("/", 1)[0], created_s, files))
    return sorted(found, key=lambda upload: upload.created_s, reverse=True)


def _stays_inside(name: str) -> bool:
    """Whether a name of a manifest, which comes from elsewhere, stays in the folder it is written to."""
    return not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts and "\\" not in name


def _fetch(upload: _Upload, uploads: list[_Upload], run_dir: str | Path | None, progress: ProgressCallback) -> Path:
    parent = Path(run_dir).parent if run_dir is not None else Path("runs")
    temporary = parent / f".fetching-{uuid.uuid4().hex[:8]}"
    progress(Progress("download", 0, 1, f"Fetching {upload.name}"))
    with explain_write_errors(parent):
        try:
            run_files = [name for name in upload.files if name.startswith(f"{RUN_FILES}/")]
            if f"{RUN_FILES}/{RECIPE}" not in run_files:
                raise _NotWhole(f"{upload.name} has no {RECIPE}")
            for name in run_files:
                upload.fetch(name, temporary / name.removeprefix(f"{RUN_FILES}/"))
            upload.fetch_checkpoint(temporary)
            _fetch_best(upload, uploads, temporary)
            target = Path(run_dir) if run_dir is not None else new_path(Recipe.from_yaml(temporary / RECIPE))
            if target.is_dir() and not any(target.iterdir()):
                target.rmdir()
            if target.exists():
                raise RunFolderError(f"{target} exists and is not empty. Give a new folder for the fetched run.")
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    progress(Progress("download", 1, 1, f"Fetched {upload.name}"))
    return target


def _fetch_best(upload: _Upload, uploads: list[_Upload], folder: Path) -> None:
    """Fetch the checkpoint of the best evaluation too: ``load_best_model_at_end`` may come back to it."""
    state = folder / CHECKPOINTS / upload.name / TRAINER_STATE
    best = best_checkpoint_name(state.read_bytes()) if state.is_file() else None
    if best is None or best == upload.name:
        return
    runs = upload.path.rsplit("/", 1)[0]
    for other in uploads:
        if other.path == f"{runs}/{best}":
            try:
                other.fetch_checkpoint(folder)
            except _NotWhole as reason:
                shutil.rmtree(folder / CHECKPOINTS / best, ignore_errors=True)
                _LOG.warning("The best checkpoint is left out: %s.", reason)
