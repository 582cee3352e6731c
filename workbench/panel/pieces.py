"""Small parts the views are put together from: cards, folds, progress lines, plotly boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from ..events import Progress
from ..report.html import render_error
from .fields import classed, set_hidden
from .texts import Say


def style_sheet() -> Any:
    """Return an invisible widget that carries the panel's style sheet."""
    css = Path(__file__).with_name("panel.css").read_text(encoding="utf-8")
    return classed(widgets.HTML(f"<style>{css}</style>"), "wb-style")


def button(label: str, action: Callable[[], Any], *classes: str, tooltip: str = "") -> Any:
    """Return a button; without an icon, whose glyph would enter the accessible name."""
    made = classed(widgets.Button(description=label, tooltip=tooltip or label), "wb-button", *classes)
    made.on_click(lambda _: action())
    return made


def card(number: int, title: str, hint: str, children: Sequence[Any], *classes: str) -> Any:
    """Return one section of the panel; those of one way of steps have numbers, the others 0."""
    note = f"<p>{escape(hint)}</p>" if hint else ""
    mark = f'<span class="wb-number" aria-hidden="true">{number}</span>' if number else ""
    plain = () if number else ("wb-card-head-plain",)
    head = classed(widgets.HTML(f"<h3>{mark}{escape(title)}</h3>{note}"), "wb-card-head", *plain)
    return classed(widgets.VBox((head, *children)), "wb-card", *classes)


def subtitle(text: str) -> Any:
    """Return a small heading inside a card."""
    return classed(widgets.HTML(f'<div class="wb-sub">{escape(text)}</div>'), "wb-sub-box")


def field_box(control: Any, *classes: str) -> Any:
    """Return a control under its label, as the settings show theirs."""
    return classed(widgets.VBox((control,)), "wb-field", *classes)


class Fold:
    """A button that shows and hides what is below it; its label says which."""

    def __init__(
        self, label: str, children: Sequence[Any], *, name: str = "", on_open: Callable[[], Any] | None = None
    ) -> None:
        self._label = label
        self._on_open = on_open
        self._button = button(f"▸ {label}", self.toggle, "wb-fold", tooltip=f"Show: {label}")
        if name:
            self._button.add_class(name)
        self._body = classed(widgets.VBox(tuple(children)), "wb-fold-body", "wb-hidden")
        self.box = classed(widgets.VBox((self._button, self._body)), "wb-fold-box")
        self.is_open = False

    def toggle(self) -> None:
        """Open or close."""
        self.is_open = not self.is_open
        self._button.description = f"{'▾' if self.is_open else '▸'} {self._label}"
        self._button.tooltip = f"{'Hide' if self.is_open else 'Show'}: {self._label}"
        set_hidden(self._body, not self.is_open)
        if self.is_open and self._on_open:
            self._on_open()

    def set_label(self, label: str) -> None:
        """Change the words on the button."""
        if label != self._label:
            self._label = label
            self._button.description = f"{'▾' if self.is_open else '▸'} {label}"


class ProgressLine:
    """One line for long work: what it does, how far it is, and a button that cancels it."""

    def __init__(self, cancel: Callable[[], Any], say: Say | None = None) -> None:
        say = say or Say()
        self._text = widgets.HTML()
        self._button = button(say("Cancel"), cancel, "wb-cancel", tooltip=say("Cancel; nothing is lost"))
        self.box = classed(widgets.HBox((self._text, self._button)), "wb-bar-row", "wb-progress-row", "wb-hidden")
        self._text.layout.flex = "1 1 200px"
        self._text.layout.width = "auto"

    def show(self, progress: Progress) -> None:
        """Show how far the work is."""
        value = render_progress(progress)
        if value != self._text.value:
            self._text.value = value
        set_hidden(self.box, False)

    def hide(self) -> None:
        """Take the line away."""
        set_hidden(self.box, True)


def render_progress(progress: Progress, *, run: bool = False) -> str:
    """Return a progress bar with its words; a moving one where the total is not known."""
    words = escape(progress.message or progress.stage)
    kind = " wb-track-run" if run else ""
    if progress.total:
        percent = min(100.0, 100.0 * progress.done / progress.total)
        bar = (
            f'<span class="wb-track{kind}" role="progressbar" aria-valuemin="0" aria-valuemax="100" '
            f'aria-valuenow="{percent:.0f}" aria-label="{words}"><i style="width:{percent:.1f}%"></i></span>'
            f"<span>{percent:.0f} %</span>"
        )
    else:
        bar = f'<span class="wb-track{kind} wb-track-unknown" role="progressbar" aria-label="{words}"><i></i></span>'
    return f'<div class="wb-progress">{bar}<span>{words}</span></div>'


class ErrorBox:
    """A place for an error in words; empty and hidden while all is well."""

    def __init__(self) -> None:
        self.box = classed(widgets.HTML(), "wb-error", "wb-hidden")

    def show(self, error: BaseException, what: str = "") -> None:
        """Show an error with its traceback folded away."""
        self.show_html(render_error(error, what))

    def show_html(self, html: str) -> None:
        """Show an alert that is already escaped."""
        self.box.value = html
        set_hidden(self.box, False)

    def say(self, sentence: str) -> None:
        """Show one sentence as an alert."""
        self.box.value = f'<div class="wb-alert" role="alert">{escape(sentence)}</div>'
        set_hidden(self.box, False)

    def clear(self) -> None:
        """Take the error away."""
        if self.box.value:
            self.box.value = ""
        set_hidden(self.box, True)


class PlotlyBox:
    """A plotly picture that the front end draws from plain JSON, with SVG for fronts without plotly.

    The picture travels once as the output of a core widget; a FigureWidget would send plotly's whole bundle with it.
    """

    def __init__(self, *, use_plotly: bool) -> None:
        self._use_plotly = use_plotly
        self.widget = classed(widgets.Output() if use_plotly else widgets.HTML(), "wb-plotly")

    def show(self, figure: dict[str, Any], svg: str) -> None:
        """Show a figure (plotly JSON) or, where plotly does not load, its SVG."""
        if not self._use_plotly:
            self.widget.value = svg
            return
        figure = {**figure, "config": {"displaylogo": False, "responsive": True}}
        self.widget.outputs = (
            {
                "output_type": "display_data",
                "data": {"application/vnd.plotly.v1+json": figure, "text/html": svg, "text/plain": "picture"},
                "metadata": {},
            },
        )

    def clear(self) -> None:
        """Take the picture away."""
        if self._use_plotly:
            self.widget.outputs = ()
        else:
            self.widget.value = ""
