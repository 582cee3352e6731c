"""One HTML page of a run: state, curves, findings, exports and settings, with nothing to fetch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from ..observe.history import History
from ..recipe import Recipe
from ..report.charts import Series, render_line_chart
from ..report.findings_html import render_findings_list
from ..report.text import STATE_LABELS
from ..train.run_folder import FINDINGS, RunSummary, summarise_run
from ..units import format_bytes, format_count, format_seconds
from .formats import FORMATS

PAGE_NAME = "report.html"
TITLE_LIMIT = 120
CHART_SIZE = (560, 240)


def write_page(recipe: Recipe, folder: Path, target: Path) -> None:
    """Write ``report.html``.

    Args:
        recipe: The run's settings.
        folder: The run's folder.
        target: An existing folder.
    """
    page = render_page(
        recipe, summarise_run(folder), History.from_folder(folder), read_findings(folder), read_grades(folder)
    )
    (target / PAGE_NAME).write_text(page, encoding="utf-8")


def render_page(
    recipe: Recipe,
    run: RunSummary,
    history: History,
    findings: list[dict[str, Any]],
    grades: Mapping[str, Mapping[str, Any]],
) -> str:
    """Return the page. It holds its pictures and looks itself, so that it opens anywhere.

    Args:
        recipe: The run's settings.
        run: What the run folder says.
        history: Its figures, step by step.
        findings: Its findings as JSON values.
        grades: Of its exports, by format.
    """
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    title = f"{run.model} on {run.data}"[:TITLE_LIMIT]
    charts = "".join(f'<div class="chart">{chart}</div>' for chart in render_charts(history))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>"
        f"<h1>{escape(title)}</h1>{_facts(run, history)}"
        f"<h2>Curves</h2>{charts or '<p>No step was recorded.</p>'}"
        f"<h2>Findings</h2>{render_findings_list(findings, 'Nothing stood out.')}"
        f"{_grades(grades)}"
        f"<h2>Settings</h2><pre>{escape(recipe.to_yaml(only_changed=True).strip() or '{}')}</pre>"
        "</main></body></html>\n"
    )


def render_charts(history: History) -> list[str]:
    """Return an SVG for each kind of figure that the run recorded."""
    kinds = (
        ("Loss", "", (("training", "loss", "line"), ("held-out", "eval_loss", "dots"))),
        ("Learning rate", "", (("learning rate", "learning_rate", "line"),)),
        ("Gradient norm", "", (("gradient norm", "grad_norm", "line"),)),
        ("Speed", "rate", (("tokens per s", "tokens_per_s", "line"),)),
        (
            "Memory",
            "bytes",
            (("peak of the step", "peak_allocated_bytes", "line"), ("after it", "allocated_bytes", "line")),
        ),
    )
    charts = []
    for title, unit, lines in kinds:
        series = []
        for label, column, style in lines:
            steps, values = history.decimated(column)
            if len(values):
                series.append(Series(label, steps.tolist(), values.tolist(), style))
        if series:
            charts.append(render_line_chart(title, series, unit=unit, size=CHART_SIZE))
    return charts


def read_findings(folder: Path) -> list[dict[str, Any]]:
    """Return the findings of a run folder; a half-written last line is left out."""
    found = []
    path = folder / FINDINGS
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found


def read_grades(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the grades of the exports in a run folder, by format."""
    grades = {}
    for path in sorted(folder.glob("exports/*/export.json")):
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(row.get("grade"), dict) and row.get("format") in FORMATS:
            grades[str(row["format"])] = row["grade"]
    return grades


def grade_cells(to: str, grade: Mapping[str, Any]) -> list[str]:
    """Return a grade as words, one a column of ``GRADE_HEADER``."""
    rise = grade["perplexity"] / grade["merged_perplexity"] - 1
    gain = 100 * (grade["accuracy_fraction"] - grade["merged_accuracy_fraction"])
    return [
        to,
        format_bytes(grade["num_bytes"]),
        f"{grade['compression']:.2f}x",
        f"{grade['perplexity']:.3f} ({rise:+.2%})",
        f"{grade['accuracy_fraction']:.1%} ({gain:+.1f} points)",
        f"{grade['mean_logit_difference']:.4f}",
        f"{grade['same_next_token_fraction']:.1%}",
        f"{format_count(grade['tokens_per_s'])} ({grade['tokens_per_s'] / grade['merged_tokens_per_s']:.2f}x)",
        grade["reader"],
    ]


GRADE_HEADER = (
    "format",
    "weights",
    "compression",
    "perplexity",
    "accuracy",
    "logit difference",
    "same next token",
    "tokens/s read",
    "read by",
)


def _facts(run: RunSummary, history: History) -> str:
    elapsed, rate = history.last("elapsed_s"), history.last("tokens_per_s")
    facts = [
        ("State", STATE_LABELS.get(run.state, run.state)),
        ("Steps", str(run.num_steps_done)),
        ("Loss", "" if run.loss is None else f"{run.loss:.4f}"),
        ("Held-out loss", "" if run.eval_loss is None else f"{run.eval_loss:.4f}"),
        ("Method", run.method),
        ("Trained for", "" if elapsed is None else format_seconds(elapsed)),
        ("Tokens/s", "" if rate is None else format_count(rate)),
    ]
    cells = "".join(f"<div><span>{name}</span><b>{escape(value)}</b></div>" for name, value in facts if value)
    return f'<div class="facts">{cells}</div>'


def _grades(grades: Mapping[str, Mapping[str, Any]]) -> str:
    if not grades:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in GRADE_HEADER)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in grade_cells(to, grade)) + "</tr>"
        for to, grade in grades.items()
    )
    return (
        "<h2>Exports</h2><p>Against the merged model in float32, on the same rows.</p>"
        f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'
    )
