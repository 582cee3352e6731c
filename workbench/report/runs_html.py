"""HTML of many runs: the cells of a table's row, and tables of runs side by side. Plain data in, escaped text out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from ..units import format_bytes, format_seconds
from .charts import SERIES_COLOURS, Series, render_line_chart

Say = Callable[[str], str]
# Names of runs in a comparison: short enough for a legend.
LETTERS = "ABCDEF"


def plain(text: str) -> str:
    """Return the text as it is: what tables in English say."""
    return text


def render_cells(header: Sequence[str], cells: Sequence[str], kinds: Sequence[str] = ()) -> str:
    """Return one row of a table made of rows: each value with its column's name, which narrow panels show.

    Args:
        header: Names of the columns.
        cells: One text a column.
        kinds: A class name a column, or empty.
    """
    names = [*kinds, *[""] * (len(cells) - len(kinds))]
    parts = "".join(
        f'<span class="wb-cell{f" wb-cell-{kind}" if kind else ""}"><small>{escape(name)} </small>'
        f"{escape(cell) or '–'}</span>"
        for name, cell, kind in zip(header, cells, names, strict=True)
    )
    return f'<div class="wb-cells">{parts}</div>'


def render_head(header: Sequence[str]) -> str:
    """Return the row of column names above such rows; hidden from screen readers, which hear them with each value."""
    return (
        f'<div class="wb-cells" aria-hidden="true">{"".join(f"<span>{escape(name)}</span>" for name in header)}</div>'
    )


def render_grid(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Return a table that scrolls by itself where it is wider than the panel."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="wb-scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="wb-grid">'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def render_run_names(names: Sequence[str]) -> str:
    """Return the legend of a comparison: a letter and a colour for each run."""
    items = "".join(
        f'<li><i class="wb-dot" style="background:{SERIES_COLOURS[index % len(SERIES_COLOURS)]}"></i>'
        f"<b>{LETTERS[index]}</b> {escape(name)}</li>"
        for index, name in enumerate(names)
    )
    return f'<ul class="wb-run-names">{items}</ul>'


def render_curves(
    losses: Sequence[tuple[Sequence[float], Sequence[float]]],
    eval_losses: Sequence[tuple[Sequence[float], Sequence[float]]],
    say: Say = plain,
) -> str:
    """Return the loss curves of several runs in one picture, and those of the held-out rows in a second one."""
    charts = []
    for title, curves, style in ((say("Loss"), losses, "line"), (say("Held-out loss"), eval_losses, "dashed")):
        series = [Series(LETTERS[index], list(x), list(y), style) for index, (x, y) in enumerate(curves)]
        if any(len(one.x) for one in series):
            charts.append(f'<figure class="wb-chart">{render_line_chart(title, series, size=(420, 210))}</figure>')
    return f'<div class="wb-charts wb-charts-svg">{"".join(charts)}</div>' if charts else ""


def prediction_rows(rows: Sequence[Any], say: Say = plain) -> list[list[str]]:
    """Return predicted against measured memory and step time, a row each, with a cell for each run.

    Args:
        rows: ``RunRow`` of each run.
        say: Translates the names of the rows.
    """
    predicted = [row.predicted for row in rows]
    table: list[tuple[str, list[str]]] = [
        (say("Peak predicted"), [_form(one and one.peak_bytes, format_bytes) for one in predicted]),
        (say("Peak measured"), [_form(row.measured_peak_bytes, format_bytes) for row in rows]),
        (
            say("Measured ÷ predicted"),
            [_ratio(row.measured_peak_bytes, row.predicted and row.predicted.peak_bytes) for row in rows],
        ),
        (say("Step predicted"), [_form(one and one.step_s, format_seconds) for one in predicted]),
        (say("Step measured"), [_form(row.measured_step_s, format_seconds) for row in rows]),
        (
            say("Measured ÷ predicted"),
            [_ratio(row.measured_step_s, row.predicted and row.predicted.step_s) for row in rows],
        ),
    ]
    return [[name, *cells] for name, cells in table]


def setting_rows(settings: Mapping[str, Sequence[Any]], form: Callable[[Any], str]) -> list[list[str]]:
    """Return the settings that differ as rows: the field and its value in each run."""
    return [[path, *(form(value) or "–" for value in values)] for path, values in settings.items()]


def _form(value: Any, form: Callable[[float], str]) -> str:
    return "–" if value is None or not math.isfinite(value) else form(value)


def _ratio(measured: float | None, predicted: float | None) -> str:
    return "–" if not measured or not predicted else f"{measured / predicted:.2f}"
