"""Public memory planners beside ours, on the same rows, each in an environment of its own.

A planner's figure is graded on the counter its own documentation names. Where a planner's constants were fitted to the
rows, its figures there are marked as fitted.
"""

from .environment import PLANNERS, Planner
from .run import PlannerFigure, run_planners

__all__ = ["PLANNERS", "Planner", "PlannerFigure", "run_planners"]
