"""Importing the large libraries from several threads: one after the other, and whole.

An estimate in one thread and a run in another both import transformers and, through it, accelerate. Python breaks the
deadlock that their locks would end in by handing out half-made modules, and the import fails for good: "cannot import
name 'dispatch_model' from partially initialized module". Whoever comes second here waits instead.
"""

from __future__ import annotations

import threading

_LOCK = threading.Lock()


def load_libraries() -> None:
    """Import what building a model needs; in a thread of one's own, before anything that imports a part of it."""
    with _LOCK:
        import accelerate  # noqa: F401
        import transformers.modeling_utils  # noqa: F401
