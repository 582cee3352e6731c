"""What every toggle would change, what makes a run fit, the largest that fits, and the device a run needs.

The functions load on first use: they need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .plan import DeviceChoice, DeviceTable, Largest, Plan, PlanOption, SettingsFront, ToggleEffect, Tried

if TYPE_CHECKING:
    from .devices import which_device
    from .fit import NothingFitsError, make_fit
    from .largest import largest_batch, largest_length, largest_model
    from .run import other_values, plan_run
    from .search import find_settings
    from .space import explicit_fields

__all__ = [
    "DeviceChoice",
    "DeviceTable",
    "Largest",
    "NothingFitsError",
    "Plan",
    "PlanOption",
    "SettingsFront",
    "ToggleEffect",
    "Tried",
    "explicit_fields",
    "find_settings",
    "largest_batch",
    "largest_length",
    "largest_model",
    "make_fit",
    "other_values",
    "plan_run",
    "which_device",
]

_HOMES = {
    "NothingFitsError": "fit",
    "explicit_fields": "space",
    "find_settings": "search",
    "largest_batch": "largest",
    "largest_length": "largest",
    "largest_model": "largest",
    "make_fit": "fit",
    "other_values": "run",
    "plan_run": "run",
    "which_device": "devices",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)
