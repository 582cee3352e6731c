"""What a finished run becomes: an adapter or a merged model to use elsewhere, or a script that repeats the run.

Names load on first use: choosing a format needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {"FORMATS": "formats", "ExportReport": "export", "export_run": "export", "load_trained": "loading"}

__all__ = ["FORMATS", "ExportReport", "export_run", "load_trained"]

if TYPE_CHECKING:
    from .export import ExportReport, export_run
    from .formats import FORMATS
    from .loading import load_trained


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'workbench.export' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
