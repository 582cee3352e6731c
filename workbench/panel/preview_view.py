"""The preview of section 1: rows as the model will see them, and how long they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from ..estimate.estimate import BatchShape
from ..events import Cancel, Progress, ProgressCallback
from ..recipe import Recipe
from ..report.data_html import render_data_facts, render_preview
from ..report.figures import length_figure, render_length_histogram
from .background import Background, Outcome
from .fields import classed
from .pieces import ErrorBox, Fold, PlotlyBox, ProgressLine, button
from .view_model import Change, PanelModel

RELOAD_DELAY_S = 0.6
NUM_ROWS = 3


class PreviewView:
    """Prepares the data in the background and shows it.

    Attributes:
        prepared: The PreparedData of the newest settings, or None.
        listeners: Called when ``prepared`` changes.
    """

    def __init__(self, model: PanelModel, background: Background, *, use_plotly: bool) -> None:
        self.prepared: Any = None
        self.listeners: list[Callable[[], None]] = []
        self._model = model
        self._background = background
        self._key: tuple[Any, ...] | None = None
        self._wanted_key: tuple[Any, ...] | None = None
        self._progress = ProgressLine(lambda: background.cancel("preview"), model.say)
        self._error = ErrorBox()
        self._rows = widgets.HTML()
        self._facts = widgets.HTML()
        self._histogram = PlotlyBox(use_plotly=use_plotly)
        self._again = button(
            model.say("Load again"), self._reload, "wb-hidden", tooltip=model.say("Read the data once more")
        )
        self._fold = Fold(
            model.say("Preview rows and lengths"),
            (self._progress.box, self._error.box, self._rows, self._facts, self._histogram.widget, self._again),
            name="wb-preview-open",
            on_open=self.request,
        )
        self.box = classed(self._fold.box, "wb-preview-box")
        model.listen(self._changed)

    def request(self) -> None:
        """Prepare the data of the current settings, unless that is what is shown."""
        key = self._model.data_key()
        if key == self._key or key == self._wanted_key:
            return
        self._start(key, delay_s=0.0)

    def shape_for(self, recipe: Recipe) -> BatchShape | None:
        """Return the batch shape from real lengths, or None while these data were not prepared."""
        if self.prepared is None or self._key != PanelModel(recipe).data_key():
            return None
        from ..estimate import shape_of_data

        return shape_of_data(recipe, self.prepared)

    def _reload(self) -> None:
        self._key = None
        self._start(self._model.data_key(), delay_s=0.0)

    def _changed(self, change: Change) -> None:
        if not change.fields or change.reason == "refused":
            return
        key = self._model.data_key()
        if self._fold.is_open and key not in (self._key, self._wanted_key):
            self._start(key, delay_s=RELOAD_DELAY_S)

    def _start(self, key: tuple[Any, ...], delay_s: float) -> None:
        self._wanted_key = key
        recipe = self._model.recipe
        self._error.clear()
        self._again.add_class("wb-hidden")
        self.box.add_class("wb-busy")
        self._progress.show(Progress("tokenize", message=self._model.say("Reading the data")))
        self._background.submit(
            "preview",
            lambda progress, cancel: self._work(recipe, progress, cancel),
            lambda outcome: self._done(key, recipe, outcome),
            delay_s=delay_s,
            on_progress=self._progress.show,
        )

    def _work(self, recipe: Recipe, progress: ProgressCallback, cancel: Cancel) -> Any:
        from ..components.libraries import load_libraries

        load_libraries()
        from ..components.data import prepare_data, preview_rows
        from ..components.source import find_source, load_tokenizer

        source = find_source(recipe, for_training=False, progress=progress, cancel=cancel)
        if not source.has_tokenizer:  # the config alone has no words; fetch what training would
            source = find_source(recipe, for_training=True, progress=progress, cancel=cancel)
        cancel.check()
        tokenizer = load_tokenizer(source)
        cancel.check()
        rows = preview_rows(recipe, tokenizer, NUM_ROWS)
        if not cancel.is_set:
            self._rows.value = render_preview(rows)
        return prepare_data(recipe, tokenizer, progress=progress, cancel=cancel)

    def _done(self, key: tuple[Any, ...], recipe: Recipe, outcome: Outcome) -> None:
        self._progress.hide()
        self.box.remove_class("wb-busy")
        self._wanted_key = None
        self._again.remove_class("wb-hidden")
        if outcome.was_cancelled:
            self._error.say(self._model.say("Cancelled. Nothing was lost; “Load again” starts it once more."))
            return
        if outcome.error is not None:
            self._key, self.prepared = key, None
            self._rows.value = self._facts.value = ""
            self._histogram.clear()
            self._error.show(outcome.error, self._model.say("The preview failed"))
        else:
            self._key, self.prepared = key, outcome.value
            self._facts.value = render_data_facts(outcome.value, recipe.data.max_length)
            lengths = outcome.value.raw_lengths
            figure = length_figure(lengths, recipe.data.max_length)
            self._histogram.show(figure, render_length_histogram(lengths, recipe.data.max_length))
        for listener in self.listeners:
            listener()
