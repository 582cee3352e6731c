"""Section 3: the estimate, which follows every change, and the effects of the toggles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from ..errors import DeviceError, Problem, RecipeError
from ..estimate.estimate import BatchShape, Estimate
from ..events import Cancel, Progress, ProgressCallback
from ..hardware import Device, target_device
from ..recipe import Recipe, field_info
from ..report.html import render_effects, render_estimate, render_option
from .background import Background, Outcome
from .comms import answer_beside_cells
from .explain_view import ExplainView
from .fields import FieldView, classed, set_hidden
from .measure_view import MeasureView
from .pieces import ErrorBox, ProgressLine, button, card, subtitle
from .plan_view import PlanView
from .view_model import Change, PanelModel, format_field

DEBOUNCE_S = 0.03
EFFECTS_DELAY_S = 0.5

MAX_OPTIONS = 3

EMPTY = (
    '<div class="wb-estimate wb-empty"><b>The first estimate is on its way.</b><br>'
    "The model is traced without its weights.</div>"
)


class EstimateView:
    """The estimate card. ``estimate`` is the newest one, or None."""

    def __init__(
        self,
        model: PanelModel,
        background: Background,
        fields: Mapping[str, FieldView],
        *,
        use_plotly: bool,
        find_shape: Callable[[Recipe], BatchShape | None],
    ) -> None:
        self.estimate: Estimate | None = None
        self.listeners: list[Callable[[Estimate], None]] = []
        self.wants_effects: Callable[[], bool] = lambda: True
        self._model = model
        self._background = background
        self._fields = fields
        self._find_shape = find_shape
        self._picture = widgets.HTML(EMPTY)
        self._options = classed(widgets.VBox(), "wb-options")
        self._progress = ProgressLine(lambda: background.cancel("estimate"), model.say)
        self._error = ErrorBox()
        self._again = button(model.say("Estimate again"), self.request, "wb-hidden", "wb-estimate-again")
        self._explain = ExplainView(model, background, use_plotly=use_plotly, find_shape=find_shape)
        self._plan = PlanView(model, background, find_shape=find_shape)
        self._measure = MeasureView(background, model.say, estimate_again=self.request)
        self._device: Device | None = None
        self._has_effects = False
        self._plan.finished_listeners += [self._explain.request, self._resume_effects]
        self._explain.finished_listeners.append(self._resume_effects)
        self.box = card(
            3,
            model.say("Estimate"),
            model.say("Traced from the real model code; follows every change."),
            (
                self._error.box,
                self._again,
                self._picture,
                self._measure.box,
                self._progress.box,
                self._options,
                self._plan.box,
                self._explain.box,
            ),
            "wb-card-estimate",
        )
        model.listen(self._changed)

    def request(self) -> None:
        """Ask for a new estimate; older requests are forgotten."""
        self.box.add_class("wb-busy")
        recipe = self._model.recipe
        self._background.drop("effects")
        self._fields_box(stale=True)
        self._options.children = ()
        self._background.submit(
            "estimate",
            lambda p, c: self._work(recipe, p, c),
            self._done,
            delay_s=DEBOUNCE_S,
            on_progress=self._show_progress,
        )

    def anchor(self, step_s: float) -> None:
        """Put the measured seconds of a step of this very run in the place of the predicted ones; the card says so."""
        from ..estimate.time import anchor_time

        if self.estimate is not None and step_s > 0:
            self.estimate = dataclasses.replace(self.estimate, time=anchor_time(self.estimate.time, step_s))
            self._picture.value = render_estimate(self.estimate)

    def _changed(self, change: Change) -> None:
        if change.reason not in ("refused", "target") and change.fields:
            self.request()

    def _work(self, recipe: Recipe, progress: ProgressCallback, cancel: Cancel) -> Estimate:
        from ..components.libraries import load_libraries

        load_libraries()
        from ..estimate import estimate_run

        try:
            device = target_device(recipe)
        except DeviceError as error:
            field = "hardware.emulate" if recipe.hardware.emulate else "hardware.device"
            fix = None if recipe.hardware.emulate else "auto"
            self._model.set_target(None, Problem(field, str(error), ((field, fix),)))
            raise
        self._device = device
        self._model.set_target(device.facts(for_estimate=device.is_emulated))
        return estimate_run(recipe, device, shape=self._find_shape(recipe), progress=progress, cancel=cancel)

    def _show_progress(self, progress: Progress) -> None:
        self._progress.show(progress)

    def _done(self, outcome: Outcome) -> None:
        self._progress.hide()
        self.box.remove_class("wb-busy")
        set_hidden(self._again, not outcome.was_cancelled)
        if outcome.was_cancelled:
            earlier = " The figures below are of earlier settings." if self.estimate is not None else ""
            self._error.say(f"The estimate was cancelled.{earlier}")
            if self.estimate is None:
                self._picture.value = ""
            return
        if outcome.error is not None:
            self._fail(outcome.error)
            return
        self._error.clear()
        self.estimate = outcome.value
        self._picture.value = render_estimate(outcome.value)
        self._measure.show(self._device)
        self._explain.request()
        for listener in self.listeners:
            listener(outcome.value)
        if self.wants_effects():
            self._request_effects()

    def _fail(self, error: BaseException) -> None:
        self.estimate = None
        self._measure.show(None)
        self._picture.value = '<div class="wb-estimate wb-empty">No estimate for these settings.</div>'
        self._explain.stop()
        say = self._model.say
        what = say("These settings cannot run") if isinstance(error, RecipeError) else say("The estimate failed")
        self._error.show(error, what)
        for view in self._fields.values():
            view.set_effect("")

    # -- effects of the toggles --------------------------------------------------------------------------------------

    def _resume_effects(self) -> None:
        """Ask again for effects that more important work has ended."""
        if not self._has_effects and self.estimate is not None and self.wants_effects():
            self._request_effects()

    def _request_effects(self) -> None:
        self._has_effects = False
        recipe = self._model.recipe

        def work(progress: ProgressCallback, cancel: Cancel) -> Any:
            from ..plan import plan_run

            return plan_run(
                recipe, target_device(recipe), shape=self._find_shape(recipe), progress=progress, cancel=cancel
            )

        self._background.submit("effects", work, self._show_effects, priority=5, delay_s=EFFECTS_DELAY_S)

    def _show_effects(self, outcome: Outcome) -> None:
        if outcome.value is None or self.estimate is None:
            return  # no plan is no fault: the toggles work without it
        self._has_effects = True
        by_field: dict[str, list[Any]] = {}
        for effect in outcome.value.effects:
            by_field.setdefault(effect.field, []).append(effect)
        for path, view in self._fields.items():
            effects = sorted(by_field.get(path, ()), key=lambda one: one.memory_delta_bytes)
            words = [effect_word(path, one.value) for one in effects]
            view.set_effect(render_effects(effects, words, self.estimate.memory.verdict) if effects else "")
        self._fields_box(stale=False)
        self._show_options(outcome.value.options)

    def _fields_box(self, *, stale: bool) -> None:
        """Grey the effects of earlier settings until the new ones are there."""
        for view in self._fields.values():
            view.set_effect_stale(stale)

    def _show_options(self, options: Sequence[Any]) -> None:
        """Offer changes that make the run fit, each with a button that makes them."""
        rows = []
        for option in list(options)[:MAX_OPTIONS]:
            words = ", ".join(f"{field_info(path).label}: {effect_word(path, v)}" for path, v in option.changes.items())
            text = widgets.HTML(render_option(words, option))
            apply = button(
                self._model.say("Apply"), lambda one=option: self._model.set_fields(one.changes, "fix"), "wb-apply"
            )
            apply.tooltip = f"Set {words}"
            rows.append(classed(widgets.HBox((text, apply)), "wb-option-row"))
        title = [subtitle(self._model.say("Ways to make it fit"))] if rows else []
        self._options.children = (*title, *rows)
        answer_beside_cells(self._options)


def effect_word(path: str, value: Any) -> str:
    """Return what a value is called beside its effect, e.g. ``"on"`` or ``"adafactor"``."""
    info = field_info(path)
    if info.type_name == "bool":
        return "on" if value else "off"
    return format_field(value) or "empty"
