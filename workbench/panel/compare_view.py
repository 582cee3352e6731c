"""The tab of comparisons: chosen runs side by side, and variants of the settings estimated side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from ..estimate.estimate import BatchShape
from ..events import Cancel, Progress, ProgressCallback
from ..pipeline.run_rows import MAX_COMPARED, RunComparison, RunRow, compare_runs
from ..recipe import Recipe, iter_fields
from ..report.comparison import comparison_table
from ..report.runs_html import LETTERS, prediction_rows, render_curves, render_grid, render_run_names, setting_rows
from .background import Background, Outcome
from .fields import classed, with_tooltip
from .pieces import ErrorBox, ProgressLine, button, card, field_box
from .view_model import PanelModel, format_field

RUNS, VARIANTS = "compare", "variants"


def suggested_values(path: str, recipe: Recipe) -> str:
    """Return values worth comparing of a field, as a person writes them."""
    info = next(one for one in iter_fields() if one.path == path)
    current = recipe.get(path)
    if info.type_name == "bool":
        return "off, on"
    if info.choices:
        return ", ".join(format_field(choice) for choice in info.choices)
    if isinstance(current, int | float) and current > 0:
        return ", ".join(format_field(info.parse(format_field(type(current)(current * by)))) for by in (1, 2, 4))
    return format_field(current)


def read_values(path: str, text: str) -> list[str]:
    """Return what a person listed; values that hold commas themselves are separated by semicolons."""
    return [part.strip() for part in text.split(";" if ";" in text else ",") if part.strip()]


class CompareView:
    """Chosen runs, and variants."""

    def __init__(
        self,
        panel: PanelModel,
        background: Background,
        files: Background,
        *,
        chosen: Callable[[], Sequence[RunRow]],
        find_shape: Callable[[Recipe], BatchShape | None],
    ) -> None:
        """Make the view.

        Args:
            panel: The settings that variants are made of.
            background: Estimates.
            files: Reads the runs' folders.
            chosen: The chosen runs.
            find_shape: Batches of the chosen data, or None.
        """
        self._panel, self._chosen, self._find_shape = panel, chosen, find_shape
        self._background, self._files = background, files
        self._say = say = panel.say
        self._runs = classed(widgets.HTML(), "wb-compared")
        self._error = ErrorBox()
        runs = card(
            0, say("Runs side by side"), say("Only the settings that differ, the curves, predicted and measured."),
            (self._runs, self._error.box), "wb-card-compare",
        )  # fmt: skip
        self._field = with_tooltip(
            widgets.Dropdown, say("The setting that differs between the variants"), description=say("Setting"),
            options=[(info.label, info.path) for info in iter_fields() if info.toggle and info.show != "hidden"],
            value="adapter.r",
        )  # fmt: skip
        self._values = with_tooltip(
            widgets.Text, say("Values to try, with commas between them"), description=say("Values"),
            value=suggested_values("adapter.r", panel.recipe), continuous_update=False,
        )  # fmt: skip
        self._field.observe(self._suggest, names="value")
        self._line = ProgressLine(lambda: background.cancel(VARIANTS), say)
        self._variant_error = ErrorBox()
        self._variants = classed(widgets.HTML(), "wb-variants")
        fields = classed(widgets.VBox((field_box(self._field), field_box(self._values))),
                         "wb-fields", "wb-variant-fields")  # fmt: skip
        buttons = (
            button(say("Estimate the variants"), self.estimate_values, "wb-primary", "wb-estimate-variants"),
            button(say("Compare the methods"), self.estimate_methods, "wb-estimate-methods",
                   tooltip=say("Full fine-tuning, LoRA and QLoRA, with and without checkpointing")),
        )  # fmt: skip
        variants = card(
            0, say("Variants of these settings"), say("Estimated, nothing runs: what would another value cost?"),
            (fields, classed(widgets.HBox(buttons), "wb-bar-row"), self._line.box, self._variant_error.box,
             self._variants),
            "wb-card-variants",
        )  # fmt: skip
        self.box = classed(widgets.VBox((runs, variants)), "wb-page")

    # -- runs --------------------------------------------------------------------------------------------------------

    def request(self) -> None:
        """Compare the runs that are chosen now."""
        rows = list(self._chosen())
        self._error.clear()
        if len(rows) < 2:
            words = self._say("Choose two or more runs in the tab Runs.")
        elif len(rows) > MAX_COMPARED:
            words = self._say("Choose at most {count} runs.", count=MAX_COMPARED)
        else:
            folders = [row.summary.path for row in rows]
            self._files.submit(RUNS, lambda progress, cancel: compare_runs(folders), self._done)
            return
        self._runs.value = f'<div class="wb-empty">{escape(words)}</div>'

    def _done(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._runs.value = ""
            self._error.show(outcome.error, self._say("The runs cannot be compared"))
        elif not outcome.was_cancelled:
            self._runs.value = self._render(outcome.value)

    def _render(self, found: RunComparison) -> str:
        say = self._say
        letters = [LETTERS[index] for index in range(len(found.rows))]
        settings = setting_rows(found.settings, format_field)
        same = f'<p class="wb-hint">{escape(say("Their settings are the same."))}</p>'
        table = render_grid([say("Setting"), *letters], settings, say("Settings that differ")) if settings else same
        measured = render_grid(
            [say("Figure"), *letters], prediction_rows(found.rows, say), say("Predicted and measured")
        )
        names = render_run_names([row.summary.name for row in found.rows])
        return f"{names}{render_curves(found.losses, found.eval_losses, say)}{table}{measured}"

    # -- variants ----------------------------------------------------------------------------------------------------

    def estimate_values(self) -> None:
        """Estimate the settings with each of the values."""
        from ..pipeline.comparing import variants_over

        path = self._field.value
        try:
            variants = variants_over({path: read_values(path, self._values.value)})
        except Exception as error:
            self._variant_error.show(error)
            return
        self._estimate(variants)

    def estimate_methods(self) -> None:
        """Estimate the methods that every course compares."""
        from ..pipeline.comparing import METHODS

        self._estimate(METHODS)

    def _estimate(self, variants: Mapping[str, Mapping[str, Any]]) -> None:
        recipe, shape = self._panel.recipe, self._find_shape

        def work(progress: ProgressCallback, cancel: Cancel) -> Any:
            from ..pipeline.comparing import compare_recipes

            return compare_recipes(recipe, variants, shape=shape, progress=progress, cancel=cancel)

        self._variant_error.clear()
        self._line.show(Progress(RUNS, 0, len(variants), self._say("Estimating the variants")))
        self._background.submit(VARIANTS, work, self._show_variants, on_progress=self._line.show)

    def _show_variants(self, outcome: Outcome) -> None:
        self._line.hide()
        if outcome.was_cancelled:
            self._variant_error.say(self._say("Cancelled. Nothing was changed."))
            return
        if outcome.error is not None:
            self._variant_error.show(outcome.error)
            return
        rows = [row.to_dict() for row in outcome.value]
        header, cells = comparison_table(rows)
        reasons = [f"{one['name']}: {one['problem']}" for one in rows if one["problem"]]
        problems = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
        notes = f'<ul class="wb-plan-notes">{problems}</ul>' if problems else ""
        self._variants.value = render_grid(header, cells, self._say("Variants, estimated")) + notes

    def _suggest(self, change: Any) -> None:
        self._values.value = suggested_values(change["new"], self._panel.recipe)
