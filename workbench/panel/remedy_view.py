"""What the doctors offer after a failure: one button per remedy, which applies it and goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from ..diagnose import Fix
from .fields import classed, set_hidden
from .pieces import button


class RemedyView:
    """Rows of a button and a sentence; hidden while there is nothing to apply."""

    def __init__(self, apply: Callable[[Mapping[str, Any]], Any]) -> None:
        """Make an empty view.

        Args:
            apply: Called with the changes of the remedy whose button is pressed.
        """
        self._apply = apply
        self.box = classed(widgets.VBox(()), "wb-remedies", "wb-hidden")
        self.remedies: list[Fix] = []

    def show(self, remedies: Sequence[Fix], label: str, plain: str = "") -> None:
        """Show remedies, best first.

        Args:
            remedies: Those with changes to apply.
            label: Words on each button.
            plain: Words on a last button that changes nothing; none without.
        """
        self.remedies = [fix for fix in remedies if fix.changes]
        rows = [self._row(label, fix.changes, fix.text, is_first=not index) for index, fix in enumerate(self.remedies)]
        if plain:
            rows.append(self._row(plain, {}, "With the settings as they were.", is_first=not rows))
        self.box.children = tuple(rows)
        set_hidden(self.box, not rows)

    def clear(self) -> None:
        """Take all away."""
        self.show((), "")

    def _row(self, label: str, changes: Mapping[str, Any], text: str, *, is_first: bool) -> Any:
        classes = ("wb-primary", "wb-apply") if is_first else ("wb-apply",)
        made = button(label, lambda: self._apply(changes), *classes, tooltip=f"{label}: {text}")
        words = widgets.HTML(f'<span class="wb-remedy">{escape(text)}</span>')
        words.layout.flex = "1 1 240px"
        words.layout.width = "auto"
        return classed(widgets.HBox((made, words)), "wb-bar-row")
