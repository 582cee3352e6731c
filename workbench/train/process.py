"""What is one per process while a run is on: the live run, interpreter and torch settings, the exit hook."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import RunError
from ..events import LIVE_STATES
from ..hardware import Device
from ..recipe import Recipe

if TYPE_CHECKING:
    from .session import Session

# While a run is on, the interpreter switches threads ten times as often: torch gives the interpreter lock away around
# every operator, and each time a busy cell would keep it for 5 ms. Measured beside a cell of pure Python: 8 to 14
# times the steps per second; nothing measurable beside an idle kernel.
SWITCH_INTERVAL_S = 5e-4

# How long the end of the process waits for a live run to be saved.
EXIT_WAIT_S = 60.0

_LOG = logging.getLogger("workbench")
_LOCK = threading.Lock()
_live: Session | None = None


def become_live(session: Session) -> None:
    """Make ``session`` the one run of this process.

    Two runs would share the random generators, so that neither could be repeated, and the memory.

    Raises:
        RunError: Another run is live.
    """
    global _live
    with _LOCK:
        if _live is not None:
            raise RunError(
                f"A run is {_live.state} in this process ({_live.run_dir}). One process trains one run at a time: "
                "stop it or wait for it first."
            )
        _live = session
    atexit.register(_stop_at_exit, session)


def end_live(session: Session) -> None:
    """Let the next run start."""
    global _live
    with _LOCK:
        if _live is session:
            _live = None
            atexit.unregister(_stop_at_exit)


def live_session() -> Session | None:
    """Return the run that is live in this process, or None."""
    return _live


@contextlib.contextmanager
def run_settings(recipe: Recipe, device: Device) -> Iterator[None]:
    """Set what is process-wide while a run is on, and put it back."""
    import torch

    interval = sys.getswitchinterval()
    matmul = torch.backends.cuda.matmul
    allowed = matmul.allow_tf32
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        if device.has_caching_allocator:
            matmul.allow_tf32 = recipe.training.tf32
        yield
    finally:
        matmul.allow_tf32 = allowed
        sys.setswitchinterval(interval)


def _stop_at_exit(session: Session) -> None:
    """Save a run that is live when the process ends: its thread would be killed in the middle of a step."""
    if session.state in LIVE_STATES:
        _LOG.warning("The process ends while a run is %s; stopping and saving it (%s).", session.state, session.run_dir)
        session.stop(save=True)
        session.finished.wait(EXIT_WAIT_S)
