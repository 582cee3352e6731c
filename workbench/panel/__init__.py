"""The panel: ipywidgets on top of the stages. Nothing below knows it."""

from .workbench import Workbench

__all__ = ["Workbench"]
