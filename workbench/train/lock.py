"""One process per run folder: a lock that dies with its process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from ..errors import RunFolderError

LOCK_NAME = "lock"
BEAT_INTERVAL_S = 5.0

# Only where the file system has no locks: a lock of another machine that has not been touched for so long is dead.
STALE_AFTER_S = 120.0


class FolderLock:
    """A lock on a folder, held until ``release`` or the end of the process.

    The system's own file lock decides wherever there is one: it cannot go stale. On file systems without locks
    (some network drives) the process number and the time of the last beat decide.
    """

    def __init__(self, path: Path, handle: int, has_system_lock: bool) -> None:
        self._path = path
        self._handle: int | None = handle
        self._has_system_lock = has_system_lock
        self._last_beat = time.monotonic()

    @classmethod
    def acquire(cls, folder: Path) -> FolderLock:
        """Lock ``folder``.

        Raises:
            RunFolderError: Another process, or another run of this one, holds it.
            OSError: The folder cannot be written.
        """
        path = folder / LOCK_NAME
        owner = _read_owner(path)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            has_system_lock = _try_system_lock(handle)
            if has_system_lock is False or (has_system_lock is None and _seems_alive(path, owner)):
                raise RunFolderError(_text_in_use(folder, owner))
            os.ftruncate(handle, 0)
            text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since_s": round(time.time())})
            os.pwrite(handle, text.encode(), 0)
        except BaseException:
            os.close(handle)
            raise
        return cls(path, handle, bool(has_system_lock))

    @staticmethod
    def is_held(folder: Path) -> bool:
        """Whether a live process holds the lock of ``folder``."""
        path = folder / LOCK_NAME
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:
            return False
        try:
            taken = _try_system_lock(handle)
            return _seems_alive(path, _read_owner(path)) if taken is None else not taken
        finally:
            os.close(handle)

    def beat(self) -> None:
        """Touch the lock file, at most every few seconds."""
        now = time.monotonic()
        if self._handle is not None and now - self._last_beat > BEAT_INTERVAL_S:
            self._last_beat = now
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def release(self) -> None:
        """Give the folder free; may be called twice."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        # The file stays: deleting it would let a second process lock a file that a third one no longer sees.
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
        os.close(handle)


def _try_system_lock(handle: int) -> bool | None:
    """Return True when locked, False when someone else has it, None where the system has no such lock."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _read_owner(path: Path) -> dict[str, Any]:
    try:
        owner = json.loads(path.read_text(encoding="utf-8") or "{}")
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _seems_alive(path: Path, owner: dict[str, Any]) -> bool:
    pid = owner.get("pid")
    if not isinstance(pid, int):
        return False
    if owner.get("host") == socket.gethostname():
        import psutil

        return bool(psutil.pid_exists(pid))
    try:
        return time.time() - path.stat().st_mtime < STALE_AFTER_S
    except OSError:
        return False


def _text_in_use(folder: Path, owner: dict[str, Any]) -> str:
    who = "another run"
    if owner.get("pid") == os.getpid():
        who = "another run of this process"
    elif owner.get("pid"):
        who = f"process {owner['pid']} on {owner.get('host', 'this machine')}"
        if owner.get("since_s"):
            who += f" since {time.strftime('%H:%M', time.localtime(owner['since_s']))}"
    return f"{folder} is in use by {who}. Stop that run, or give another folder."
