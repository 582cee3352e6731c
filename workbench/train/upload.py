"""Finished checkpoints and the result go to an fsspec URL, so that a machine that is taken away loses nothing.

::

    URL/RUN/checkpoints/step-000100/   the checkpoint, run/ (recipe, metrics, events) and, last of all, manifest.json
    URL/RUN/adapter/                   (or model/), with its manifest.json
    URL/RUN/.uploading-3f9a1c/         on its way; whatever has no manifest is not whole and is never read

Uploading has a thread of its own: a slow network never holds up a step. The files are opened when a checkpoint is
finished, so that they can be read even after ``save_total_limit`` has deleted them.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from ..errors import Problem, RecipeError
from ..events import Event
from ..recipe import Recipe
from ..units import format_bytes, format_seconds
from .run_folder import CHECKPOINTS, EVENTS, FINDINGS, METRICS, RECIPE

MANIFEST = "manifest.json"
RUN_FILES = "run"  # Folder of an uploaded checkpoint with the files of the run folder as they were then.
TRAINER_STATE = "trainer_state.json"

# Waits before the second and third try: most failures of a network are over by then.
RETRY_WAITS_S = (1.0, 4.0)
# How long the end of a run waits for its last uploads. Spot machines give seconds to minutes; a store that does not
# answer must not keep a finished run alive for ever.
FINISH_WAIT_S = 900.0

_TEMPORARY = ".uploading-"
_CHUNK_BYTES = 4 * 1024 * 1024


def open_store(url: str) -> tuple[Any, str]:
    """Return ``(filesystem, path)`` of an fsspec URL.

    Raises:
        RecipeError: No installed package knows this kind of URL.
    """
    try:
        store, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        # fsspec says which package to install.
        text = f"{url} cannot be opened: {error}. Without a package: file:///some/folder."
        raise RecipeError([Problem("training.upload_to", text, (("training.upload_to", None),))]) from error
    return store, str(path).rstrip("/")


def best_checkpoint_name(state: bytes) -> str | None:
    """Return the folder's name of the best checkpoint that a ``trainer_state.json`` speaks of, or None."""
    best = json.loads(state).get("best_model_checkpoint")
    return best.replace("\\", "/").rsplit("/", 1)[-1] if best else None


@dataclass
class _Bundle:
    """What becomes whole together: open files, each to be read up to a length."""

    name: str
    files: dict[str, tuple[BinaryIO, int]] = field(default_factory=dict)
    best: str | None = None

    def open_folder(self, folder: Path) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.open_file(path, path.relative_to(folder).as_posix())

    def open_file(self, path: Path, name: str) -> None:
        # The length of now: metrics and events go on growing while they are uploaded.
        self.files[name] = (open(path, "rb"), path.stat().st_size)  # noqa: SIM115  # closed when it is uploaded

    def close(self) -> None:
        for file, _ in self.files.values():
            file.close()


class Uploader:
    """An Observer that uploads every checkpoint it hears of; failures become log events and never end a run."""

    def __init__(self, recipe: Recipe, run_dir: Path, publish: Callable[[Event], None]) -> None:
        """Make an uploader for ``training.upload_to``.

        Args:
            recipe: The settings.
            run_dir: The run's folder; its name is the folder's name below the URL.
            publish: Receives what there is to say.

        Raises:
            RecipeError: No installed package knows this kind of URL.
        """
        assert recipe.training.upload_to is not None
        self._url = recipe.training.upload_to
        self._store, root = open_store(self._url)
        self._root = f"{root}/{run_dir.resolve().name}"
        self._run_dir, self._publish = run_dir, publish
        self._keep = recipe.training.save_total_limit
        self._waiting: list[_Bundle] = []
        self._changed = threading.Condition()
        self._busy = self._closing = False
        self._thread: threading.Thread | None = None

    def on_event(self, event: Event) -> None:
        """Take a checkpoint that is whole on disk; one that still waits is replaced by it."""
        if event.kind == "checkpoint":
            folder = Path(event.data["path"])
            bundle = _Bundle(f"{CHECKPOINTS}/{folder.name}")
            bundle.open_folder(folder)
            for name in (RECIPE, METRICS, EVENTS, FINDINGS):
                if (self._run_dir / name).is_file():
                    bundle.open_file(self._run_dir / name, f"{RUN_FILES}/{name}")
            if (folder / TRAINER_STATE).is_file():
                bundle.best = best_checkpoint_name((folder / TRAINER_STATE).read_bytes())
            self._add(bundle)

    def add_result(self, folder: Path) -> None:
        """Take the saved adapter or model."""
        bundle = _Bundle(folder.name)
        bundle.open_folder(folder)
        self._add(bundle)

    def finish(self, timeout_s: float = FINISH_WAIT_S) -> None:
        """Wait until everything is uploaded or has failed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not (self._waiting or self._busy), timeout_s)
        if not done:
            self._log(f"The upload to {self._url} did not end within {format_seconds(timeout_s)} and is given up.")

    def _add(self, bundle: _Bundle) -> None:
        with self._changed:
            for old in [old for old in self._waiting if _is_superseded(old, bundle)]:
                self._waiting.remove(old)
                old.close()
            self._waiting.append(bundle)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="workbench-upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        self._try(self._remove_left_over, "Removing what an interrupted upload left")
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                bundle, self._busy = self._waiting.pop(0), True
            self._upload(bundle)

    def _upload(self, bundle: _Bundle) -> None:
        begin = time.perf_counter()
        try:
            if self._try(lambda: self._send(bundle), f"The upload of {bundle.name}"):
                size = format_bytes(sum(length for _, length in bundle.files.values()))
                took = format_seconds(time.perf_counter() - begin)
                self._log(f"Uploaded {bundle.name} to {self._url} ({size} in {took}).")
                self._try(lambda: self._remove_old(protect=bundle.best), "Deleting older uploads")
        finally:
            bundle.close()

    def _try(self, action: Callable[[], None], what: str) -> bool:
        """Do something to the store, three times at most; return whether it succeeded."""
        for wait_s in (*RETRY_WAITS_S, None):
            try:
                action()
                return True
            except Exception as error:  # Stores raise what they like; none of it may end a run.
                if wait_s is None:
                    reason = f"{type(error).__name__}: {error}"
                    self._log(f"{what} to {self._url} failed ({reason}); the run goes on, its folder has everything.")
                else:
                    time.sleep(wait_s)
        return False

    def _send(self, bundle: _Bundle) -> None:
        """Upload under a temporary name, move, and write the manifest last."""
        store, final = self._store, f"{self._root}/{bundle.name}"
        temporary = f"{self._root}/{_TEMPORARY}{uuid.uuid4().hex[:8]}"
        listed = {name: self._write(f"{temporary}/{name}", *source) for name, source in bundle.files.items()}
        manifest = {"version": 1, "created_s": time.time(), "name": bundle.name, "files": listed}
        store.pipe_file(f"{temporary}/{MANIFEST}", json.dumps(manifest, indent=1).encode())
        if store.exists(final):
            self._remove(final)
        for name in (*listed, MANIFEST):
            store.makedirs(f"{final}/{name}".rsplit("/", 1)[0], exist_ok=True)
            store.mv(f"{temporary}/{name}", f"{final}/{name}")
        if store.exists(temporary):  # Object stores know no empty folders.
            store.rm(temporary, recursive=True)

    def _write(self, path: str, file: BinaryIO, num_bytes: int) -> Mapping[str, Any]:
        self._store.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        file.seek(0)
        digest, left = hashlib.sha256(), num_bytes
        with self._store.open(path, "wb") as target:
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise EOFError(f"{path}: the file on disk became shorter while it was read")
                digest.update(chunk)
                target.write(chunk)
                left -= len(chunk)
        return {"num_bytes": num_bytes, "sha256": digest.hexdigest()}

    def _remove(self, folder: str) -> None:
        """Delete an uploaded folder, its manifest first: half deleted must not look whole."""
        if self._store.exists(f"{folder}/{MANIFEST}"):
            self._store.rm_file(f"{folder}/{MANIFEST}")
        self._store.rm(folder, recursive=True)

    def _remove_old(self, protect: str | None) -> None:
        if self._keep is None:
            return
        self._store.invalidate_cache()
        found = sorted(self._store.glob(f"{self._root}/{CHECKPOINTS}/*/{MANIFEST}"))
        folders = [path.rsplit("/", 1)[0] for path in found]
        for old in [folder for folder in folders if folder.rsplit("/", 1)[-1] != protect][: -self._keep]:
            self._remove(old)

    def _remove_left_over(self) -> None:
        if self._store.exists(self._root):
            for path in self._store.ls(self._root, detail=False):
                if path.rstrip("/").rsplit("/", 1)[-1].startswith(_TEMPORARY):
                    self._store.rm(path, recursive=True)

    def _log(self, message: str) -> None:
        self._publish(Event("log", {"message": message}))


def _is_superseded(old: _Bundle, new: _Bundle) -> bool:
    """Whether nobody needs the old one once the new one is there: an older checkpoint, unless it is the best one."""
    both_checkpoints = old.name.startswith(CHECKPOINTS) and new.name.startswith(CHECKPOINTS)
    return both_checkpoints and old.name.rsplit("/", 1)[-1] != new.best
