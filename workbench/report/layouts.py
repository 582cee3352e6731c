"""Layouts side by side, and the cost curve over the number of devices: text and a plotly figure, from plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..estimate.estimate import VERDICT_TEXTS
from ..estimate.layout import LayoutEstimate, LayoutTable
from ..units import GIB, format_bytes, format_count, format_seconds
from .tables import render_table

_HEADER = ("layout", "memory", "then", "sends a step", "wire", "bubble", "step", "overlapped", "tokens/s", "efficiency")
_KINDS = {"all_reduce": "reduce", "all_gather": "gather", "reduce_scatter": "scatter", "send": "send"}


def render_layouts(table: LayoutTable) -> str:
    """Return the table of layouts, the answer to "which one", and the assumptions."""
    usable = [row for row in table.rows if not row.refused]
    lines = [
        f"{table.num_devices} x {table.device_name}, {table.network_name}, {table.samples_per_step} samples a step.",
        "",
        render_table(_HEADER, [_cells(row) for row in usable]),
    ]
    lines += [f"{row.layout.name}: not possible: {row.refused}." for row in table.rows if row.refused]
    best = table.best
    if best is None:
        lines += ["", "None of these fits. Take more devices, a shorter max_length or gradient_checkpointing."]
    else:
        changes = ", ".join(f"{field}={value}" for field, value in best.layout.changes.items())
        sure = "fits" if best.verdict == "fits" else "may fit"
        lines += ["", f"Fastest that {sure}: {best.layout.name}. Set {changes}."]
    lines += [f"Note: {note}" for note in table.notes]
    return "\n".join(lines)


def _cells(row: LayoutEstimate) -> tuple[str, ...]:
    memory = row.memory
    sent = ", ".join(f"{_KINDS[kind]} {format_bytes(count)}" for kind, count in row.sent_bytes.items())
    return (
        row.layout.name,
        format_bytes(memory.process_bytes) if memory is not None else "",
        VERDICT_TEXTS[row.verdict],
        sent or "nothing",
        format_seconds(row.communication_s),
        format_seconds(row.bubble_s),
        format_seconds(row.step_s),
        format_seconds(row.overlapped_s),
        format_count(row.tokens_per_s),
        f"{row.efficiency:.0%}",
    )


def render_curve(curve: Sequence[LayoutTable]) -> str:
    """Return one line per number of devices: the best layout there and what it takes."""
    rows = []
    for table in curve:
        best = table.best
        if best is None:
            rows.append((str(table.num_devices), "nothing fits", "", "", "", ""))
            continue
        memory = format_bytes(best.memory.process_bytes) if best.memory is not None else ""
        rows.append(
            (
                str(table.num_devices),
                best.layout.name,
                memory,
                format_seconds(best.overlapped_s),
                format_count(best.tokens_per_s),
                f"{best.efficiency:.0%}",
            )
        )
    return render_table(("devices", "best layout", "memory", "step", "tokens/s", "efficiency"), rows)


def curve_figure(curves: Mapping[str, Sequence[LayoutTable]], assumptions: str = "") -> dict[str, Any]:
    """Return a plotly figure: memory per rank, step time and efficiency over the number of devices.

    Args:
        curves: ``{name of the model: tables, ascending in devices}``.
        assumptions: Shown under the title.
    """
    panels: tuple[tuple[str, Callable[[Any], float]], ...] = (
        ("memory per device (GiB)", lambda row: row.memory.process_bytes / GIB),
        ("step (s)", lambda row: row.overlapped_s),
        ("efficiency", lambda row: row.efficiency),
    )
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"title": {"text": f"Several devices<br><sub>{assumptions}</sub>"}, "height": 720}
    for index, (title, value) in enumerate(panels, 1):
        axis = "" if index == 1 else str(index)
        top = 1 - (index - 1) / len(panels)
        layout[f"yaxis{axis}"] = {"title": {"text": title}, "domain": [top - 0.28, top], "rangemode": "tozero"}
        layout[f"xaxis{axis}"] = {"type": "log", "anchor": f"y{axis}", "title": {"text": "devices"}}
        for number, (name, tables) in enumerate(curves.items()):
            found = [(table.num_devices, table.best) for table in tables if table.best is not None]
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": name,
                    "legendgroup": name,
                    "showlegend": index == 1,
                    "line": {"color": ("#2563eb", "#d97706", "#059669")[number % 3]},
                    "x": [count for count, _ in found],
                    "y": [value(best) for _, best in found],
                    "text": [best.layout.name for _, best in found],
                    "xaxis": f"x{axis}",
                    "yaxis": f"y{axis}",
                }
            )
    return {"data": data, "layout": layout}
