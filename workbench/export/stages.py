"""Progress of an export, and the place where it can be cancelled."""

from __future__ import annotations

from ..events import Cancel, Progress, ProgressCallback

NUM_STAGES = 3


def begin_stage(progress: ProgressCallback | None, cancel: Cancel | None, done: int, message: str) -> None:
    """Tell how many of the stages are done and what comes now.

    Raises:
        Cancelled: The user cancelled.
    """
    if cancel is not None:
        cancel.check()
    if progress is not None:
        progress(Progress("export", done, NUM_STAGES, message))
