"""The panel's tabs: set up and run, runs, compare, export, chat. Each fills itself when it is first shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from ..estimate.estimate import BatchShape
from ..recipe import Recipe
from .background import Background
from .compare_view import CompareView
from .fields import classed
from .runs import open_run
from .runs_view import RunsView
from .view_model import PanelModel

SETUP, RUNS, COMPARE = 0, 1, 2


class Tabs:
    """A row of tabs over the panel's views."""

    def __init__(
        self,
        model: PanelModel,
        first: Any,
        root: Path,
        *,
        show_run: Callable[[Any], Any],
        find_shape: Callable[[Recipe], BatchShape | None],
    ) -> None:
        """Make the tabs.

        Args:
            model: The panel's settings.
            first: What the first tab shows.
            root: Folder with the run folders.
            show_run: Shows a session or an ended run in the first tab.
            find_shape: Batches of the chosen data, or None.
        """
        say = model.say
        self._show_run = show_run
        self._background = Background("workbench-tabs")
        self.runs = RunsView(model, self._background, root, open_run=self._open)
        self.compare = CompareView(
            model, self._background, chosen=lambda: self.runs.model.chosen, find_shape=find_shape
        )
        pages = [
            (say("Set up and run"), first),
            (say("Runs"), self.runs.box),
            (say("Compare"), self.compare.box),
        ]
        self.widget = classed(widgets.Tab(tuple(box for _, box in pages)), "wb-tabs")
        for index, (title, _) in enumerate(pages):
            self.widget.set_title(index, title)
        self.widget.selected_index = SETUP
        self.widget.observe(self._shown, names="selected_index")

    def show(self, index: int) -> None:
        """Bring a tab to the front."""
        self.widget.selected_index = index

    def close(self) -> None:
        """End what is at work."""
        self._background.close()

    def _shown(self, change: Any) -> None:
        {RUNS: self.runs.request, COMPARE: self.compare.request}.get(change["new"], lambda: None)()

    def _open(self, path: Path) -> None:
        self._show_run(open_run(path))
        self.show(SETUP)
