"""One background thread for work that follows the user's changes: the newest request wins, stale ones are cancelled."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import Cancelled
from ..estimate.garbage import collection_paused
from ..events import Cancel, Progress, ProgressCallback

Work = Callable[[ProgressCallback, Cancel], Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job: a value, an error, or neither when it was cancelled by the user."""

    value: Any = None
    error: BaseException | None = None
    was_cancelled: bool = False


@dataclass
class _Job:
    name: str
    work: Work
    done: Callable[[Outcome], None]
    priority: int
    ready_at: float
    order: int
    on_progress: ProgressCallback | None = None
    cancel: Cancel = field(default_factory=Cancel)
    is_superseded: bool = False


@functools.cache
def _import_quantizer() -> None:
    """Import bitsandbytes once, beside the first estimate, so that the first click on "4-bit" does not wait for it."""
    with contextlib.suppress(Exception):  # It is optional, and the rules say so where it is needed.
        import bitsandbytes  # noqa: F401


class Background:
    """Runs named jobs in one daemon thread.

    A job replaces the waiting or running job of the same name, whose result is then dropped. A running job of a lower
    priority (a higher number) is cancelled when a more important one comes; whoever wants it asks again.
    """

    def __init__(self, name: str, *, builds_models: bool = True) -> None:
        """Make an idle one.

        Args:
            name: Of its thread.
            builds_models: Whether its jobs need transformers, which is then imported before the first: seconds that
                a look at some files need not wait for.
        """
        self._name = name
        self._builds_models = builds_models
        self._condition = threading.Condition()
        self._waiting: dict[str, _Job] = {}
        self._running: _Job | None = None
        self._thread: threading.Thread | None = None
        self._count = itertools.count()
        self._closed = False

    def submit(
        self,
        name: str,
        work: Work,
        done: Callable[[Outcome], None],
        *,
        priority: int = 0,
        delay_s: float = 0.0,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        """Run ``work(progress, cancel)`` soon and hand its outcome to ``done``, both in the thread.

        Args:
            name: Newer jobs of this name replace older ones.
            work: The job.
            done: Called unless the job was superseded.
            priority: Lower runs first.
            delay_s: Wait this long for a newer one of the same name (debouncing).
            on_progress: Told how far the job is.
        """
        job = _Job(name, work, done, priority, time.monotonic() + delay_s, next(self._count), on_progress)
        with self._condition:
            running = self._running
            if running and (running.name == name or running.priority > priority):
                running.is_superseded = True
                running.cancel.set()
            self._waiting[name] = job
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def cancel(self, name: str) -> None:
        """Cancel a job at the user's wish: ``done`` hears of it."""
        with self._condition:
            waiting = self._waiting.pop(name, None)
            if self._running and self._running.name == name:
                self._running.cancel.set()
        if waiting:
            waiting.done(Outcome(was_cancelled=True))

    def drop(self, name: str) -> None:
        """Forget a job: ``done`` is not called."""
        with self._condition:
            self._waiting.pop(name, None)
            if self._running and self._running.name == name:
                self._running.is_superseded = True
                self._running.cancel.set()

    @property
    def is_busy(self) -> bool:
        """Whether a job waits or runs."""
        with self._condition:
            return bool(self._waiting or self._running)

    def close(self) -> None:
        """End the thread after the current job's next check."""
        with self._condition:
            self._closed = True
            self._waiting.clear()
            if self._running:
                self._running.is_superseded = True
                self._running.cancel.set()
            self._condition.notify_all()

    def _loop(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            # What the user waits for is shown before the collector may start: it takes as long as a trace.
            with collection_paused() if job.priority == 0 else contextlib.nullcontext():
                outcome = self._run(job)
                with self._condition:
                    self._running = None
                    dropped = job.is_superseded
                if not dropped:
                    job.done(outcome)
            del job, outcome  # a waiting thread must not hold the last result, nor frames of the last error

    def _next(self) -> _Job | None:
        with self._condition:
            while not self._closed:
                now = time.monotonic()
                ready = [job for job in self._waiting.values() if job.ready_at <= now]
                if ready:
                    job = min(ready, key=lambda one: (one.priority, one.order))
                    del self._waiting[job.name]
                    self._running = job
                    return job
                soonest = min((job.ready_at for job in self._waiting.values()), default=None)
                self._condition.wait(None if soonest is None else max(soonest - now, 0.001))
        return None

    def _run(self, job: _Job) -> Outcome:
        def progress(step: Progress) -> None:
            if job.on_progress and not job.is_superseded:
                job.on_progress(step)

        try:
            if self._builds_models:
                # Whole first: while another thread is still importing it, ``from transformers import X`` looks into
                # the module object that is about to be replaced by a lazy one, and fails.
                import transformers  # noqa: F401

                _import_quantizer()
            return Outcome(value=job.work(progress, job.cancel))
        except Cancelled:
            return Outcome(was_cancelled=True)
        except BaseException as error:  # SystemExit of a broken library must not end the thread silently either
            return Outcome(error=error)
