"""What every toggle would change, and what makes a run fit. ``plan_run`` loads on first use: it needs torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .plan import Plan, PlanOption, ToggleEffect

if TYPE_CHECKING:
    from .run import other_values, plan_run

__all__ = ["Plan", "PlanOption", "ToggleEffect", "other_values", "plan_run"]


def __getattr__(name: str) -> Any:
    if name not in ("plan_run", "other_values"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".run", __name__), name)
