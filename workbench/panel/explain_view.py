"""Why this much memory: sentences, a picture to click on, and who lives at the instant that was picked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets

from ..estimate.estimate import BatchShape, Estimate
from ..estimate.explanation import MemoryPicture
from ..events import MEMORY_CATEGORIES, Cancel, Progress, ProgressCallback
from ..hardware import target_device
from ..recipe import Recipe
from ..report.explanation import (
    explanation_figure,
    render_explanation_html,
    render_explanation_svg,
    render_holders,
)
from ..report.text import CATEGORY_LABELS
from .background import Background, Outcome
from .comms import answer_beside_cells
from .fields import classed, with_tooltip
from .pieces import ErrorBox, Fold, PlotlyBox, ProgressLine
from .view_model import PanelModel

HINT = "Click a band of the picture, or choose an instant, to see which modules hold it."


class PickBridge(anywidget.AnyWidget):
    """Invisible; sends ``{"kind": "pick", "point", "band"}`` when the picture beside it is clicked."""

    _esm = Path(__file__).with_name("explain.js")


class ExplainView:
    """A fold that asks for the explanation when it is opened, and again when the settings change while it is open."""

    def __init__(
        self,
        model: PanelModel,
        background: Background,
        *,
        use_plotly: bool,
        find_shape: Callable[[Recipe], BatchShape | None],
    ) -> None:
        self.estimate: Estimate | None = None
        self.finished_listeners: list[Callable[[], None]] = []
        self._model = model
        self._background = background
        self._find_shape = find_shape
        self._progress = ProgressLine(lambda: background.cancel("explain"), model.say)
        self._error = ErrorBox()
        self._words = widgets.HTML()
        self._picture = PlotlyBox(use_plotly=use_plotly)
        self._instant = with_tooltip(
            widgets.Dropdown, model.say("Instant of the run"), options=[("peak", -1)], description=model.say("Instant")
        )
        self._band = with_tooltip(
            widgets.Dropdown,
            model.say("What is listed"),
            options=[("all categories", "")],
            description=model.say("Category"),
        )
        self._holders = classed(widgets.HTML(), "wb-holders-box")
        for control in (self._instant, self._band):
            control.observe(self._chosen, names="value")
        bridge = [self._make_bridge()] if use_plotly else []
        row = classed(widgets.HBox((self._instant, self._band)), "wb-bar-row", "wb-pickers")
        children = (self._progress.box, self._error.box, self._words, self._picture.widget, row, self._holders, *bridge)
        self._body = classed(widgets.VBox(children), "wb-explain")
        self._fold = Fold(model.say("Why this much memory"), (self._body,), name="wb-why-open", on_open=self.request)
        self.box = self._fold.box

    @property
    def is_open(self) -> bool:
        """Whether the fold is open."""
        return self._fold.is_open

    def request(self) -> None:
        """Ask for the explanation of the settings as they stand, unless it is shown."""
        recipe = self._model.recipe
        if not self.is_open or (self.estimate is not None and self.estimate.recipe_digest == recipe.digest()):
            return
        self._progress.show(Progress("explain", message=self._model.say("Reading the run")))

        def work(progress: ProgressCallback, cancel: Cancel) -> Estimate:
            from ..components.libraries import load_libraries

            load_libraries()
            from ..estimate import explain_run

            shape = self._find_shape(recipe)
            return explain_run(recipe, target_device(recipe), shape=shape, progress=progress, cancel=cancel)

        self._background.submit("explain", work, self._done, priority=3, on_progress=self._progress.show)

    def stop(self) -> None:
        """Forget what was asked: there is no run to explain."""
        self._background.drop("explain")
        self._progress.hide()

    def pick(self, point: int, band: str | None) -> None:
        """Show who lives at a point of the picture: all, or one category."""
        picture = self._shown
        if picture is None or not 0 <= point < picture.num_points:
            return
        names = {value for _, value in self._band.options}
        wanted = band if band in names else ""
        self._holders.value = render_holders(picture, point, wanted or None)
        if self._band.value != wanted:
            self._band.unobserve(self._chosen, names="value")
            self._band.value = wanted
            self._band.observe(self._chosen, names="value")

    @property
    def _shown(self) -> MemoryPicture | None:
        explanation = None if self.estimate is None else self.estimate.explanation
        return None if explanation is None else explanation.picture

    def _make_bridge(self) -> Any:
        bridge = classed(PickBridge(), "wb-pick-bridge")
        bridge.on_msg(self._clicked)
        return bridge

    def _clicked(self, _widget: Any, content: Any, _buffers: Any) -> None:
        if isinstance(content, dict) and content.get("kind") == "pick" and isinstance(content.get("point"), int):
            self.pick(content["point"], content.get("band"))

    def _chosen(self, _change: Any) -> None:
        picture = self._shown
        if picture is not None:
            point = picture.peak if self._instant.value < 0 else self._instant.value
            self.pick(point, self._band.value or None)

    def _done(self, outcome: Outcome) -> None:
        self._progress.hide()
        if outcome.was_cancelled:
            self._error.say(self._model.say("Cancelled. Nothing was lost; close and open this part to ask again."))
        elif outcome.error is not None:
            self.estimate = None
            self._words.value = self._holders.value = ""
            self._picture.clear()
            self._error.show(outcome.error, "There is no explanation")
        else:
            self._error.clear()
            self.estimate = outcome.value
            self._show(outcome.value)
        for listener in self.finished_listeners:
            listener()

    def _show(self, estimate: Estimate) -> None:
        picture = self._shown
        if picture is None:
            return
        self._words.value = render_explanation_html(estimate) + f'<p class="wb-hint">{HINT}</p>'
        figure = explanation_figure(picture, estimate.memory.capacity_bytes)
        self._picture.show(figure, render_explanation_svg(picture))
        self._instant.options = instants(picture)
        self._instant.value = -1
        present = [name for name in MEMORY_CATEGORIES if name in picture.bytes_by_category]
        self._band.options = [("all categories", ""), *((CATEGORY_LABELS[name], name) for name in present)]
        self._band.value = ""
        self.pick(picture.peak, None)
        answer_beside_cells(self._body)


def instants(picture: MemoryPicture) -> list[tuple[str, int]]:
    """Return instants worth choosing: the peak (-1), the next highest, and the highest of each phase of its step."""
    found = [("peak", -1)]
    if picture.next_highest >= 0:
        found.append(("next highest", picture.next_highest))
    totals = [sum(values) for values in zip(*picture.bytes_by_category.values(), strict=True)]
    best: dict[str, int] = {}
    for point in range(picture.num_points):
        name = picture.phase_at(point)
        if name not in best or totals[point] > totals[best[name]]:
            best[name] = point
    return [*found, *((f"highest of {name}", point) for name, point in best.items())]
