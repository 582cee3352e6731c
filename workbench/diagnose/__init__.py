"""Doctors: each reads what was measured and returns Findings. They decide nothing and change nothing."""

from __future__ import annotations

import importlib
from typing import Any

from .finding import Finding, Fix
from .leaks import LeakVerdict, judge_leak, leak_finding
from .loss import find_loss_faults
from .run import diagnose_run, judge_memory

__all__ = [
    "Finding",
    "Fix",
    "LeakVerdict",
    "diagnose_run",
    "find_loss_faults",
    "judge_leak",
    "judge_memory",
    "leak_finding",
]


def __getattr__(name: str) -> Any:
    # The clinic injects faults into models and needs torch; reading findings does not.
    if name == "clinic":
        return importlib.import_module(f"{__name__}.clinic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
