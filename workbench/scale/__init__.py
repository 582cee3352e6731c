"""The same Recipe on several devices: the files of existing engines, and starting them as processes of their own."""

from __future__ import annotations

from .engines import ENGINES, Plan, plan_launch
from .launch import Launched, launch_run, write_files

__all__ = ["ENGINES", "Launched", "Plan", "launch_run", "plan_launch", "write_files"]
