"""A comparison as a table: one row a variant, only the columns that have something to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..estimate.estimate import VERDICT_TEXTS
from ..units import format_bytes, format_count, format_seconds
from .tables import render_table

if TYPE_CHECKING:
    from collections.abc import Iterable

Column = tuple[str, Callable[[Mapping[str, Any]], str]]


def comparison_table(rows: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of a comparison; columns in which no row has a value are left out.

    Args:
        rows: ``ComparedRun.to_dict()`` of each variant.
    """
    data = list(rows)
    columns = [(name, [render(row) for row in data]) for name, render in _COLUMNS]
    shown = [(name, cells) for name, cells in columns if any(cells)]
    return [name for name, _ in shown], [list(cells) for cells in zip(*(cells for _, cells in shown), strict=True)]


def render_comparison(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a comparison as a text table, with the reason of every variant that could not be tried below it."""
    data = list(rows)
    header, cells = comparison_table(data)
    lines = [render_table(header, cells)]
    lines += [f"{row['name']}: {row['problem']}" for row in data if row["problem"]]
    return "\n".join(lines)


def comparison_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a comparison as a Markdown table; bars in names are escaped."""
    header, cells = comparison_table(rows)
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _estimated(*path: str) -> Callable[[Mapping[str, Any]], Any]:
    def find(row: Mapping[str, Any]) -> Any:
        value = row["estimate"]
        for name in path:
            if value is None:
                return None
            value = value[name]
        return value

    return find


def _measured(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda row: None if row["measured"] is None else row["measured"][name]


def _column(name: str, find: Callable[[Mapping[str, Any]], Any], render: Callable[[Any], str]) -> Column:
    def cell(row: Mapping[str, Any]) -> str:
        value = find(row)
        return "" if value is None else render(value)

    return name, cell


def _dollars(low_high: Sequence[float]) -> str:
    low, high = (f"{value:.2g}" for value in low_high)
    return low if low == high else f"{low} to {high}"


def _trainable(row: Mapping[str, Any]) -> Any:
    estimate = row["estimate"]
    if estimate is None:
        return None
    return estimate["num_trainable_parameters"], estimate["num_parameters"]


_COLUMNS: tuple[Column, ...] = (
    ("variant", lambda row: str(row["name"])),
    _column("trains", _trainable, lambda value: f"{format_count(value[0])} ({value[0] / max(1, value[1]):.2%})"),
    _column("memory (estimated)", _estimated("memory", "process_bytes"), format_bytes),
    _column("verdict", _estimated("memory", "verdict"), lambda value: VERDICT_TEXTS[value]),
    _column("allocated (estimated)", _estimated("memory", "peak_allocated_bytes"), format_bytes),
    _column("allocated (measured)", _measured("peak_bytes"), format_bytes),
    _column("step (estimated)", _estimated("time", "step_s"), format_seconds),
    _column("step (measured)", _measured("step_s"), format_seconds),
    _column("tokens/s (estimated)", _estimated("time", "tokens_per_s"), format_count),
    _column("tokens/s (measured)", _measured("tokens_per_s"), format_count),
    _column("USD per 1,000 tokens", _measured("cost_usd_per_1000_tokens"), _dollars),
    _column("USD per 1,000 tokens (estimated)", _estimated("time", "cost_usd_per_1000_tokens"), _dollars),
    _column("loss, first steps", _measured("first_loss"), lambda value: f"{value:.4f}"),
    _column("loss, last steps", _measured("last_loss"), lambda value: f"{value:.4f}"),
    _column("held-out loss", _measured("eval_loss"), lambda value: f"{value:.4f}"),
    _column("held-out accuracy", _measured("eval_accuracy"), lambda value: f"{value:.3f}"),
)
