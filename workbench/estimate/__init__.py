"""Predict a run: trace it on meta tensors, unroll its layers, replay the allocator, time its operators.

Names load on first use: the nouns of ``estimate.py`` are plain data and must not cost the import of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .estimate import (
    VERDICT_TEXTS,
    BatchShape,
    Estimate,
    MemoryEstimate,
    PeakHolder,
    TimeEstimate,
    Verdict,
)
from .layout import Layout, LayoutEstimate, LayoutTable

if TYPE_CHECKING:
    from .allocator import CachingAllocator
    from .capacity import with_smallest_capacity
    from .explain import explain_run
    from .recorder import StorageRecorder
    from .run import clear_caches, estimate_run
    from .shape import full_shape, shape_of_data
    from .sharding import estimate_layouts

_HOMES = {
    "CachingAllocator": "allocator",
    "StorageRecorder": "recorder",
    "clear_caches": "run",
    "estimate_layouts": "sharding",
    "estimate_run": "run",
    "explain_run": "explain",
    "full_shape": "shape",
    "shape_of_data": "shape",
    "with_smallest_capacity": "capacity",
}

__all__ = [
    "VERDICT_TEXTS",
    "BatchShape",
    "CachingAllocator",
    "Estimate",
    "Layout",
    "LayoutEstimate",
    "LayoutTable",
    "MemoryEstimate",
    "PeakHolder",
    "StorageRecorder",
    "TimeEstimate",
    "Verdict",
    "clear_caches",
    "estimate_layouts",
    "estimate_run",
    "explain_run",
    "full_shape",
    "shape_of_data",
    "with_smallest_capacity",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)
