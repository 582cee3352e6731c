"""Exceptions as one sentence for a person, and as the RunError that ``wait`` raises."""

from __future__ import annotations

from ..errors import RunError, WorkbenchError


def sentence_of(error: BaseException) -> str:
    """Return what a person needs to know of an exception, in one sentence or two."""
    if isinstance(error, WorkbenchError):
        return str(error)
    first = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in text:
        return (
            f"Out of memory ({text}). Halve training.per_device_train_batch_size and double "
            "training.gradient_accumulation_steps: the effective batch stays the same."
        )
    return f"The run failed ({text}). The traceback names the line."


def as_run_error(error: BaseException) -> RunError:
    """Return a fresh RunError with ``error`` as its cause.

    Raising the kept exception itself again would add the frames of each waiting cell to its traceback.
    """
    kind = type(error) if isinstance(error, RunError) else RunError
    fresh = kind(sentence_of(error))
    fresh.__cause__ = error
    return fresh
