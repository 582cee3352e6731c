"""Doctors: each reads what was measured and returns Findings. They decide nothing and change nothing."""

from __future__ import annotations

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
