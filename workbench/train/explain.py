"""Exceptions as one sentence for a person, and as the RunError that ``wait`` raises."""

from __future__ import annotations

from ..errors import RunError, WorkbenchError
from .teardown import chain_of

# How a host that is full says so: NumPy and Python raise MemoryError, torch's CPU allocator a RuntimeError.
_FULL_HOST = ("can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that a device or the host has no memory left."""
    return any(
        isinstance(link, MemoryError)
        or type(link).__name__ == "OutOfMemoryError"
        or any(words in str(link).lower() for words in _FULL_HOST)
        for link in chain_of(error)
    )


def sentence_of(error: BaseException) -> str:
    """Return what a person needs to know of an exception, in one sentence or two."""
    if isinstance(error, WorkbenchError):
        return str(error)
    first = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
    if is_out_of_memory(error):
        return (
            f"Out of memory ({text}). Halve training.per_device_train_batch_size and double "
            "training.gradient_accumulation_steps: the effective batch stays the same."
        )
    return f"The run failed ({text}). The traceback names the line."


def as_run_error(error: BaseException, text: str = "") -> RunError:
    """Return a fresh RunError with ``error`` as its cause, and ``text`` or one sentence about it.

    Raising the kept exception itself again would add the frames of each waiting cell to its traceback.
    """
    kind = type(error) if isinstance(error, RunError) else RunError
    fresh = kind(text or sentence_of(error))
    fresh.__cause__ = error
    return fresh
