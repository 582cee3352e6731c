"""Progress of an export, and the place where it can be cancelled."""

from __future__ import annotations

from ..events import Cancel, Progress, ProgressCallback

# Merging takes two, then come writing the format, reading it back, and the move.
NUM_STAGES = 5


def begin_stage(progress: ProgressCallback | None, cancel: Cancel | None, done: int, message: str) -> None:
    """Tell how many of the stages are done and what comes now.

    Raises:
        Cancelled: The user cancelled.
    """
    if cancel is not None:
        cancel.check()
    if progress is not None:
        progress(Progress("export", done, NUM_STAGES, message))
