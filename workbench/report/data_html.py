"""HTML of a data set: rows as the model will see them, and what was made of all rows. Everything is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ..components.preview import PreviewRow
from ..units import format_count

MAX_PREVIEW_CHARACTERS = 4000
MAX_BAD_ROWS_SHOWN = 5
MAX_CLASSES_SHOWN = 12


def render_preview(rows: Sequence[PreviewRow]) -> str:
    """Return rows as the model will see them; learned tokens are coloured *and* underlined, with a legend."""
    shown = "".join(_render_row(index, row) for index, row in enumerate(rows, start=1))
    legend = (
        '<div class="wb-preview-legend"><span class="wb-learned">learned</span> '
        '<span class="wb-context">context only</span> '
        '<span class="wb-cut">⋯ cut at max length</span></div>'
    )
    return f'<div class="wb-preview">{legend}{shown}</div>'


def _render_row(index: int, row: PreviewRow) -> str:
    runs: list[tuple[bool, list[str]]] = []
    length = 0
    for text, is_learned in row.tokens:
        length += len(text)
        if length > MAX_PREVIEW_CHARACTERS:
            break
        if runs and runs[-1][0] == is_learned:
            runs[-1][1].append(text)
        else:
            runs.append((is_learned, [text]))
    body = "".join(
        f'<span class="{"wb-learned" if is_learned else "wb-context"}">{escape("".join(texts))}</span>'
        for is_learned, texts in runs
    )
    if length > MAX_PREVIEW_CHARACTERS:
        body += '<span class="wb-cut"> … the rest of this row is not shown</span>'
    if row.was_truncated:
        body += '<span class="wb-cut"> ⋯</span>'
    named = f" · class {escape(row.label)}" if row.label else ""
    named += f" · {row.num_images} image{'' if row.num_images == 1 else 's'}" if row.num_images else ""
    cut = f" · cut from {row.num_raw_tokens}" if row.was_truncated else ""
    return (
        f'<div class="wb-row"><div class="wb-row-head">Row {index} · {row.num_tokens} tokens · '
        f"{row.num_supervised} learned{cut}{named} · {escape(row.place)}</div>"
        f'<div class="wb-row-text" tabindex="0">{body}</div></div>'
    )


def render_data_facts(prepared: Any, max_length: int) -> str:
    """Return what preparing the data found: counts, shares cut and padded, rows that cannot be used and why.

    Args:
        prepared: A ``PreparedData``.
        max_length: The length it was cut at.
    """
    report = prepared.report
    padding = report.padding
    classes = [
        (f"class {name}", format_count(count)) for name, count in list(report.classes.items())[:MAX_CLASSES_SHOWN]
    ]
    facts = [
        *classes,
        ("training samples", format_count(len(prepared.lengths))),
        ("held-out rows", format_count(report.num_evaluation_rows)),
        ("tokens", format_count(prepared.num_tokens)),
        ("learned", _percent(report.supervised_fraction)),
        (f"rows cut at {max_length}", _percent(report.truncated_fraction)),
        ("padding", _percent(padding.longest)),
        ("grouped by length", _percent(padding.group_by_length)),
        ("packed", _percent(padding.packing)),
        ("all to max length", _percent(padding.max_length)),
    ]
    shown = "".join(f"<span>{escape(name)} <b>{escape(value)}</b></span>" for name, value in facts)
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    read = f"<li>Rows are read as {escape(report.format)}.</li>" if report.format else ""
    return (
        f'<div class="wb-data-facts">{shown}</div><ul class="wb-data-notes">{read}{notes}</ul>'
        f"{_render_bad_rows(report.bad_rows, report.num_bad_rows)}"
    )


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.1f} %" if 0 < percent < 10 else f"{percent:.0f} %"


def _render_bad_rows(rows: Sequence[object], count: int) -> str:
    if not count:
        return ""
    items = "".join(f"<li>{escape(str(row))}</li>" for row in rows[:MAX_BAD_ROWS_SHOWN])
    more = count - min(len(rows), MAX_BAD_ROWS_SHOWN)
    rest = f"<li>and {more} more</li>" if more > 0 else ""
    words = "1 row cannot be used" if count == 1 else f"{count} rows cannot be used"
    return f'<details class="wb-notes" open><summary>{words}</summary><ul>{items}{rest}</ul></details>'
