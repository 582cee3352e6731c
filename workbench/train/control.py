"""Pause and stop: asked for by any thread, obeyed by the training thread at its next micro-step border."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class StopRequested(Exception):  # noqa: N818  # Not an error: the way out of the trainer's nested loops.
    """Someone asked the run to stop. Never leaves ``train/``."""


class Control:
    """The wishes of other threads."""

    def __init__(self, on_pause: Callable[[bool], None] = lambda paused: None) -> None:
        """Make a control.

        Args:
            on_pause: Called in the training thread with True when it stands still and False when it goes on.
        """
        self._on_pause = on_pause
        self._changed = threading.Condition()
        self._pause_wanted = False
        self._stop_wanted = False

    @property
    def stop_wanted(self) -> bool:
        """Whether the run was asked to stop."""
        return self._stop_wanted

    @property
    def pause_wanted(self) -> bool:
        """Whether the run was asked to pause and not to go on since."""
        return self._pause_wanted

    def pause(self) -> None:
        """Ask to stand still at the next border."""
        self._pause_wanted = True

    def resume(self) -> None:
        """Ask to go on."""
        with self._changed:
            self._pause_wanted = False
            self._changed.notify_all()

    def stop(self) -> None:
        """Ask to stop at the next border, also while paused."""
        with self._changed:
            self._stop_wanted = True
            self._changed.notify_all()

    def tell_paused(self, paused: bool) -> None:
        """Say that the run stands still, or goes on; for an engine that decides together with others."""
        self._on_pause(paused)

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait until something is wished, at most ``timeout_s``."""
        with self._changed:
            self._changed.wait(timeout_s)

    def check(self) -> float:
        """Obey: stand still while a pause is wanted. Called at every micro-step border; costs two attribute reads.

        Returns:
            Seconds that were spent standing still.

        Raises:
            StopRequested: A stop is wanted.
        """
        if self._stop_wanted:
            raise StopRequested
        if not self._pause_wanted:
            return 0.0
        start = time.perf_counter()
        self._on_pause(True)
        with self._changed:
            self._changed.wait_for(lambda: self._stop_wanted or not self._pause_wanted)
        if self._stop_wanted:
            raise StopRequested
        self._on_pause(False)
        return time.perf_counter() - start
