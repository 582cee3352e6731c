"""A Jupyter-first interactive workbench for fine-tuning Hugging Face models.

Importing this package is light: no torch, no widgets, no network. Names load on first use::

    import workbench
    panel = workbench.Workbench()      # the panel, in a notebook
    estimate = workbench.estimate_run(workbench.Recipe())
    session = workbench.start_session(workbench.Recipe()).wait()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Device": "hardware",
    "Estimate": "estimate.estimate",
    "LoopPanel": "panel.loop_panel",
    "Recipe": "recipe",
    "Session": "train.session",
    "Workbench": "panel",
    "check": "pipeline.checking",
    "clinic": "pipeline",
    "compare_recipes": "pipeline.comparing",
    "estimate_layouts": "estimate",
    "estimate_run": "estimate",
    "export_run": "export",
    "find_device": "hardware",
    "launch_run": "scale",
    "lightning_callback": "pipeline.lightning_watch",
    "plan_run": "plan",
    "preset": "recipe",
    "release": "pipeline.releasing",
    "start_session": "pipeline",
    "target_device": "hardware",
    "try_worst_batch": "pipeline",
    "watch": "pipeline.watching",
    "write_bug_report": "pipeline.bug_report",
}

__all__ = [
    "Device",
    "Estimate",
    "LoopPanel",
    "Recipe",
    "Session",
    "Workbench",
    "__version__",
    "check",
    "clinic",
    "compare_recipes",
    "estimate_layouts",
    "estimate_run",
    "export_run",
    "find_device",
    "launch_run",
    "lightning_callback",
    "plan_run",
    "preset",
    "release",
    "start_session",
    "target_device",
    "try_worst_batch",
    "watch",
    "write_bug_report",
]

if TYPE_CHECKING:
    from .estimate import estimate_layouts, estimate_run
    from .estimate.estimate import Estimate
    from .export import export_run
    from .hardware import Device, find_device, target_device
    from .panel import LoopPanel, Workbench
    from .pipeline import check, clinic, release, start_session, try_worst_batch, watch
    from .pipeline.bug_report import write_bug_report
    from .pipeline.comparing import compare_recipes
    from .pipeline.lightning_watch import lightning_callback
    from .plan import plan_run
    from .recipe import Recipe, preset
    from .scale import launch_run
    from .train.session import Session


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}. Public names: {', '.join(__all__)}.")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    if name in ("watch", "lightning_callback"):
        # What watches stands below what draws; only this module, above both, may join them.
        importlib.import_module(f"{__name__}.pipeline.live_view").register(lambda w: __getattr__("LoopPanel")(w))
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
