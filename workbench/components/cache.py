"""The user's cache folder: what is made or fetched once and kept between runs, never in the repository."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import WorkbenchError
from ..events import Cancel

# How often a wait for another process looks at the cancel flag.
LOCK_POLL_S = 0.1


def cache_dir() -> Path:
    """Return the cache folder: ``$WORKBENCH_CACHE``, else ``~/.cache/workbench``. Read at every call; not created."""
    chosen = os.environ.get("WORKBENCH_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "workbench"


@contextlib.contextmanager
def locked(target: Path, *, cancel: Cancel | None = None) -> Iterator[None]:
    """Hold the lock of ``target`` against other processes and threads; the lock file lies beside it.

    Raises:
        Cancelled: The user gave up while another process held the lock.
        OSError: The folder cannot be written.
    """
    import filelock

    target.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(str(target.parent / f".{target.name}.lock"), thread_local=False)
    while True:
        try:
            lock.acquire(timeout=LOCK_POLL_S)
            break
        except filelock.Timeout:
            if cancel is not None:
                cancel.check()
    try:
        yield
    finally:
        lock.release()


def build_once(
    target: Path,
    build: Callable[[Path], None],
    error: type[WorkbenchError],
    *,
    cancel: Cancel | None = None,
) -> Path:
    """Return ``target``, building it first where it does not exist.

    ``build`` gets an empty folder beside the target. Only when it returns is that folder renamed to ``target``, so
    that neither a crash nor a cancelled build leaves a half-made one, and two processes build it once.

    Args:
        target: Folder that is wanted.
        build: Fills the folder it is given.
        error: Raised in place of an OSError (disk full, folder read-only).
        cancel: Looked at while another process builds.
    """
    if target.is_dir():
        return target
    try:
        with locked(target, cancel=cancel):
            if target.is_dir():
                return target
            partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            try:
                build(partial)
                partial.chmod(0o755)  # mkdtemp makes it private
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as problem:
        raise error(
            f"{target} cannot be written ({problem.strerror or problem}). "
            "Free some space, or set WORKBENCH_CACHE to a folder that can be written."
        ) from problem
    return target
