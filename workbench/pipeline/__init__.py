"""Joins the stages: a run with its observers and doctors, and the same doctors for anyone's own loop.

Names load on first use: watching a plain loop needs no trainer, and checking a Recipe needs no watch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "start_session": "run",
    "watch": "watching",
    "check": "checking",
    "release": "releasing",
    "try_worst_batch": "dry_step",
}

__all__ = ["check", "release", "start_session", "try_worst_batch", "watch"]

if TYPE_CHECKING:
    from .checking import check
    from .dry_step import try_worst_batch
    from .releasing import release
    from .run import start_session
    from .watching import watch


def __getattr__(name: str) -> Any:
    if name == "clinic":
        return importlib.import_module(f"{__name__}.clinic")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'workbench.pipeline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
