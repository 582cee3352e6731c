"""Giving memory back: tracebacks hold frames, and frames hold tensors."""

from __future__ import annotations

import ctypes
import gc
import traceback
from collections.abc import Iterator


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and everything it was raised from."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions


def let_go(link: BaseException) -> None:
    """Let go of the frames that one exception holds, its causes left alone.

    Clearing the local variables alone is not enough: a frame also holds its function, and the function its closure, in
    which torch keeps the module whose hook or forward failed. A frame that still runs cannot be cleared; without the
    traceback it is freed when it returns.
    """
    if link.__traceback__ is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


def drop_frames(error: BaseException) -> str:
    """Let go of every frame that an exception and its causes hold, and return the traceback as text.

    The text goes on the exception as a note, so that whoever prints it still sees the lines.
    """
    text = "".join(traceback.format_exception(error))
    for link in chain_of(error):
        let_go(link)
    error.add_note(text.rstrip())
    return text


def collect_memory() -> None:
    """Collect cycles and hand cached memory back to the driver and the system."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        # Without a context this does nothing.
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # Not glibc: the system has no such call.
        return
