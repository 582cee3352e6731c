"""The panel's tabs: set up and run, runs, compare, export, chat. Each fills itself when it is first shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from ..errors import RunError
from ..estimate.estimate import BatchShape
from ..pipeline.run_rows import RunRow
from ..recipe import Recipe
from .background import Background
from .chat_view import ChatView
from .compare_view import CompareView
from .export_view import ExportView
from .fields import classed
from .runs import open_run
from .runs_view import RunsView
from .view_model import PanelModel

SETUP, RUNS, COMPARE, EXPORT, CHAT = range(5)


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
        self._files = Background("workbench-files", builds_models=False)
        self.runs = RunsView(model, self._files, root, open_run=self._open)
        self.compare = CompareView(
            model, self._background, self._files, chosen=lambda: self.runs.model.chosen, find_shape=find_shape
        )
        self.export = ExportView(self._background, say, rows=self._chosen_first)
        self.chat = ChatView(say, rows=self._chosen_first)
        self.runs.chosen_listeners.append(self._chosen)
        pages = [
            (say("Set up and run"), first),
            (say("Runs"), self.runs.box),
            (say("Compare"), self.compare.box),
            (say("Export"), self.export.box),
            (say("Chat"), self.chat.box),
        ]
        self.widget = classed(widgets.Tab(tuple(box for _, box in pages)), "wb-tabs")
        for index, (title, _) in enumerate(pages):
            self.widget.set_title(index, title)
        self.widget.selected_index = SETUP
        self.widget.observe(self._shown, names="selected_index")

    def show(self, index: int) -> None:
        """Bring a tab to the front."""
        self.widget.selected_index = index

    def refresh(self) -> None:
        """Read the runs again where they are in sight."""
        if self.widget.selected_index in (RUNS, EXPORT, CHAT):
            self.runs.request()

    def make_room(self) -> None:
        """Release the chat's models before a run, which needs the memory.

        Raises:
            RunError: They are being loaded, which would draw from the run's random numbers.
        """
        if self.chat.is_loading:
            raise RunError("The models of the chat are being loaded. Wait for them, or cancel it in the tab Chat.")
        self.chat.release()

    def close(self) -> None:
        """End what is at work."""
        self.chat.close()
        self._background.close()
        self._files.close()

    def _shown(self, change: Any) -> None:
        if change["new"] == COMPARE:
            self.compare.request()
        elif change["new"] in (RUNS, EXPORT, CHAT):
            self.runs.request()

    def _chosen(self) -> None:
        {EXPORT: self.export.request, CHAT: self.chat.request}.get(self.widget.selected_index, lambda: None)()

    def _chosen_first(self) -> list[RunRow]:
        chosen = self.runs.model.chosen
        return [*chosen, *(row for row in self.runs.model.rows if row not in chosen)]

    def _open(self, path: Path) -> None:
        self._show_run(open_run(path))
        self.show(SETUP)
