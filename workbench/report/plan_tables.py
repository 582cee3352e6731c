"""Results of the plan as tables of words: the CLI prints them, the panel puts a button beside each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ..estimate.estimate import VERDICT_TEXTS
from ..plan.plan import DeviceTable, Largest, PlanOption, SettingsFront, Tried
from ..units import format_bytes, format_seconds
from .tables import render_table
from .text import format_usd

NOUNS: dict[str, str] = {"batch": "batch size", "length": "length in tokens", "model": "model"}
# Device rows that the panel shows; the command line shows all.
MAX_ROWS = 60


@dataclass(frozen=True)
class PlanTable:
    """A table of words.

    Attributes:
        title: One sentence with the answer.
        header: Names of the columns.
        rows: Cells, all texts.
        changes: For each row what taking it would set, or None where there is nothing to take.
        notes: Sentences below the table.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    changes: tuple[Mapping[str, Any] | None, ...]
    notes: tuple[str, ...] = ()


def describe_changes(changes: Mapping[str, Any]) -> str:
    """Return changes as a person writes them, e.g. ``"loss_type=chunked_nll"``; ``"as it is"`` for none."""
    words = [f"{path.rpartition('.')[2]}={_word(value)}" for path, value in changes.items()]
    return ", ".join(words) or "as it is"


def front_table(front: SettingsFront) -> PlanTable:
    """Return the settings that fit, fastest first."""
    rows = [(*_option_cells(option), "; ".join(option.alters) or "nothing") for option in front.options]
    current = front.current
    now = (
        f"As it is: {VERDICT_TEXTS[current.verdict]} with {format_bytes(current.process_bytes)}, "
        f"{format_seconds(current.step_s)} per step."
    )
    samples = f"{front.effective_batch_size} samples per step"
    if rows:
        title = (
            f"{len(rows)} settings fit on {front.device_name} with {samples}; no others beat them in memory and time."
        )
    else:
        title = f"No settings fit on {front.device_name} with {samples}."
    notes = [now, f"{front.num_estimates} settings were estimated."]
    if not front.is_complete:
        notes.append("The budget ended the search; a larger one may find more.")
    if front.pinned:
        notes.append(f"Kept as you set them: {', '.join(front.pinned)}.")
    return PlanTable(
        title=title,
        header=("settings", "memory", "step", "USD per 1M tokens", "then", "alters"),
        rows=tuple(rows),
        changes=tuple(option.changes or None for option in front.options),
        notes=tuple(notes),
    )


def largest_table(largest: Largest) -> PlanTable:
    """Return the answer and what was tried on the way to it."""
    noun = NOUNS[largest.what]
    if largest.value is None:
        title = f"No {noun} fits on {largest.device_name}."
    else:
        title = f"The largest {noun} that fits on {largest.device_name} is {largest.value}."
    rows = [_tried_cells(tried) for tried in largest.tried]
    changes = [largest.changes or None if tried.value == largest.value else None for tried in largest.tried]
    notes = [largest.limit]
    if largest.what == "batch" and largest.changes:
        notes.append(f"Samples per optimizer step stay the same with {describe_changes(largest.changes)}.")
    if largest.what == "length":
        notes.append("Every sample is taken to be that long.")
    return PlanTable(
        title=title,
        header=(noun, "memory", "step", "verdict"),
        rows=tuple(rows),
        changes=tuple(changes),
        notes=tuple(notes),
    )


def devices_table(table: DeviceTable) -> PlanTable:
    """Return the devices, those that fit first, the cheapest per token first."""
    rows, changes = [], []
    for choice in table.choices[:MAX_ROWS]:
        if choice.verdict is None:
            cells = (choice.name, format_bytes(choice.capacity_bytes), "", "", "", "cannot run it", choice.problem)
        else:
            marks = [
                word
                for word, best in (
                    ("cheapest", table.cheapest),
                    ("fastest", table.fastest),
                    ("smallest", table.smallest),
                )
                if best is choice
            ]
            cells = (
                choice.name,
                format_bytes(choice.capacity_bytes),
                format_bytes(choice.process_bytes),
                format_seconds(choice.step_s),
                _per_million(choice.cost_usd_per_1000_tokens),
                VERDICT_TEXTS[choice.verdict],
                ", ".join(marks),
            )
        rows.append(cells)
        changes.append({"hardware.emulate": choice.name} if choice.verdict is not None else None)
    names = [best.name for best in (table.cheapest, table.fastest, table.smallest) if best is not None]
    title = (
        f"It fits on {len(table.fitting)} of {len(table.choices)} devices."
        if names
        else f"It surely fits on none of {len(table.choices)} devices."
    )
    return PlanTable(
        title=title,
        header=("device", "offers", "memory", "step", "USD per 1M tokens", "verdict", "note"),
        rows=tuple(rows),
        changes=tuple(changes),
        notes=tuple(table.notes),
    )


def render_plan_table(table: PlanTable) -> str:
    """Return the table as text for a terminal."""
    parts = [table.title]
    if table.rows:
        parts += ["", render_table(table.header, table.rows)]
    return "\n".join([*parts, *(["", *table.notes] if table.notes else [])])


def render_plan_row(header: Sequence[str], row: Sequence[str]) -> str:
    """Return one row as HTML, each cell with its column's name for narrow panels and screen readers."""
    cells = [
        f'<span class="wb-plan-cell"><small>{escape(name)}</small>{escape(cell) or "&nbsp;"}</span>'
        for name, cell in zip(header[1:], row[1:], strict=True)
        if cell
    ]
    return f'<div class="wb-plan-row"><b>{escape(row[0])}</b><div class="wb-plan-cells">{"".join(cells)}</div></div>'


def _option_cells(option: PlanOption) -> tuple[str, ...]:
    return (
        describe_changes(option.changes),
        format_bytes(option.process_bytes),
        format_seconds(option.step_s),
        _per_million(option.cost_usd_per_1000_tokens),
        VERDICT_TEXTS[option.verdict],
    )


def _tried_cells(tried: Tried) -> tuple[str, ...]:
    verdict = VERDICT_TEXTS[tried.verdict]
    return str(tried.value), format_bytes(tried.process_bytes), format_seconds(tried.step_s), verdict


def _per_million(cost: tuple[float, float] | None) -> str:
    return "" if cost is None else format_usd(cost[0] * 1000, cost[1] * 1000)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
