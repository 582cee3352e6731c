"""Python's cycle collector stands still while a trace runs."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_LOCK = threading.Lock()
_num_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the collector from starting by itself; pauses of several threads may overlap.

    With torch and transformers imported a full collection takes about 0.2 s, more than a whole trace, and it would
    fall into every few of them. What a collection frees also dies at an instant that has nothing to do with the traced
    run, so that without it the same trace gives the same tape.
    """
    global _num_pauses, _was_enabled
    with _LOCK:
        if _num_pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_pauses += 1
    try:
        yield
    finally:
        with _LOCK:
            _num_pauses -= 1
            if _num_pauses == 0 and _was_enabled:
                gc.enable()
