"""The panel: ipywidgets on top of the stages. Nothing below knows it."""

from .loop_panel import LoopPanel
from .workbench import Workbench

__all__ = ["LoopPanel", "Workbench"]
