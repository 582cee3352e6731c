"""The way from a watched loop to its panel. What draws stands above the watch, so it registers itself here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import RunError

_openers: list[Callable[[Any], Any]] = []


def register(open_panel: Callable[[Any], Any]) -> None:
    """Take the function that shows a watch; the newest is used."""
    _openers[:] = [open_panel]


def open_panel(watch: Any) -> Any:
    """Return the panel of a watch.

    Raises:
        RunError: Nothing that draws was registered.
    """
    if not _openers:
        raise RunError("No panel is registered. Load the watch as workbench.watch, or use workbench.LoopPanel(w).")
    return _openers[0](watch)


class Displayed:
    """Shows itself in a notebook: the live panel for a watch that is the last line of a cell, or on ``panel()``."""

    _panel: Any = None

    def report(self) -> str:
        """Return everything found as text."""
        raise NotImplementedError

    def panel(self) -> Any:
        """Return the live panel of this watch; the same one at every call."""
        if self._panel is None:
            self._panel = open_panel(self)
        return self._panel

    def _repr_mimebundle_(self, **options: Any) -> Any:
        if not _openers:
            return {"text/plain": self.report()}
        return self.panel()._repr_mimebundle_(**options)
