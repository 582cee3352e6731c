"""Pictures as SVG from plain data, for what must update at once or show anywhere.

They follow the theme through ``--jp-*`` variables with fallbacks, so that they are right in light and dark notebooks
and in a saved page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..events import MEMORY_CATEGORIES
from ..units import GIB, MIB, format_bytes, format_count
from .text import CATEGORY_LABELS

# Ordered so that neighbours in the stack differ in hue and in lightness; told apart by the legend's figures too.
CATEGORY_COLOURS: dict[str, str] = {
    "parameter": "#4878a8",
    "optimizer_state": "#8f6bb5",
    "gradient": "#c8504b",
    "activation": "#e8a33d",
    "autograd_detail": "#a8702a",
    "input": "#4aa59c",
    "temporary": "#a9a63c",
    "workspace": "#7d8a97",
    "cached": "#b4bcc4",
    "context": "#56616d",
}
TEXT_COLOUR = "var(--jp-ui-font-color1, #424242)"
FAINT_COLOUR = "var(--jp-ui-font-color2, #6b6b6b)"
RULE_COLOUR = "var(--jp-border-color2, #d5d5d5)"
FONT = "var(--jp-ui-font-family, system-ui, sans-serif)"
SERIES_COLOURS = ("#3a7cbf", "#d1802b", "#7a8794", "#8f6bb5", "#2f9c8f", "#c8504b")


@dataclass(frozen=True)
class Series:
    """One line of a chart: ``x`` and ``y`` of equal length; NaN breaks the line.

    ``style`` is ``"line"``, ``"faint"`` (raw values under a smoothed line), ``"dashed"`` or ``"dots"``.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "line"


def render_memory_bar(breakdown: Mapping[str, int], capacity_bytes: int, interval_bytes: tuple[int, int]) -> str:
    """Return an SVG: bytes by category stacked against the device's capacity, with the estimate's interval.

    Positions are percentages, so that the bar follows its column while the text keeps its size.
    """
    total = sum(size for size in breakdown.values() if size > 0)
    scale_end = max(capacity_bytes, total, interval_bytes[1]) * 1.02 or 1
    top, bar = 6, 28

    def at(num_bytes: float) -> str:
        return f"{num_bytes / scale_end * 100:.3f}%"

    parts = [
        f'<rect x="0" y="{top}" width="{at(capacity_bytes)}" height="{bar}" rx="3" '
        f'style="fill:var(--jp-layout-color2, #eee);stroke:{RULE_COLOUR}"/>'
    ]
    position = 0.0
    for name in MEMORY_CATEGORIES:
        size = breakdown.get(name, 0)
        if size <= 0:
            continue
        label = f"{CATEGORY_LABELS.get(name, name)}: {format_bytes(size)}"
        parts.append(
            f'<rect x="{at(position)}" y="{top}" width="{at(size)}" height="{bar}" fill="{CATEGORY_COLOURS[name]}" '
            f'style="stroke:var(--jp-layout-color0, #fff);stroke-width:1"><title>{escape(label)}</title></rect>'
        )
        position += size
    low, high = at(interval_bytes[0]), at(interval_bytes[1])
    middle = top + bar + 7
    whisker = f"estimate from {format_bytes(interval_bytes[0])} to {format_bytes(interval_bytes[1])}"
    parts.append(
        f'<g style="stroke:{TEXT_COLOUR};stroke-width:1.5"><title>{escape(whisker)}</title>'
        f'<line x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>'
        f'<line x1="{low}" x2="{low}" y1="{middle - 4}" y2="{middle + 4}"/>'
        f'<line x1="{high}" x2="{high}" y1="{middle - 4}" y2="{middle + 4}"/></g>'
    )
    is_right = capacity_bytes > scale_end * 0.5
    limit = at(capacity_bytes)
    parts.append(
        f'<line x1="{limit}" x2="{limit}" y1="0" y2="{top + bar + 22}" '
        f'style="stroke:{TEXT_COLOUR};stroke-width:1.5;stroke-dasharray:4 2"/>'
        f'<text x="{limit}" dx="{-6 if is_right else 6}" y="{top + bar + 22}" '
        f'text-anchor="{"end" if is_right else "start"}" font-size="11" '
        f'style="fill:{FAINT_COLOUR};font-family:{FONT}">capacity {escape(format_bytes(capacity_bytes))}</text>'
    )
    summary = f"Memory: {format_bytes(total)} of {format_bytes(capacity_bytes)}"
    return (
        f'<svg class="wb-bar" width="100%" height="{top + bar + 26}" role="img" aria-label="{escape(summary)}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(summary)}</title>{"".join(parts)}</svg>'
    )


def thin_points(x: Sequence[float], y: Sequence[float], max_points: int = 600) -> list[tuple[float, float]]:
    """Return at most ``max_points`` points that keep the extremes of every stretch; NaN points are left out."""
    pairs = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len(pairs) <= max_points:
        return pairs
    size = math.ceil(len(pairs) / (max_points // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(pairs), size):
        chunk = pairs[start : start + size]
        kept.extend(sorted({min(chunk, key=lambda p: p[1]), max(chunk, key=lambda p: p[1])}))
    return kept


def render_line_chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    lines: Sequence[tuple[str, float]] = (),
    size: tuple[int, int] = (320, 170),
) -> str:
    """Return an SVG line chart with round axis values, a legend and level lines such as a predicted peak.

    Args:
        title: Above the chart.
        series: What to draw; more than 600 points are thinned.
        unit: ``"bytes"``, ``"rate"`` or empty: how values are written.
        lines: ``(label, value)`` drawn across.
        size: Width and height in px.
    """
    width, height = size
    names = [(one.label, SERIES_COLOURS[i % len(SERIES_COLOURS)]) for i, one in enumerate(series)]
    names += [(name, TEXT_COLOUR) for name, _ in lines]
    legend_y = 14 if _legend_width(names) + text_width(title, 11.5) + 16 <= width else 28
    left, right, top, bottom = 52, 8, legend_y + 12, 20
    drawn = [(one, thin_points(one.x, one.y)) for one in series]
    xs = [p[0] for _, points in drawn for p in points]
    ys = [p[1] for _, points in drawn for p in points] + [value for _, value in lines if math.isfinite(value)]
    last = ", ".join(f"{one.label} {format_value(points[-1][1], unit)}" for one, points in drawn if points)
    label = f"{title}: {last}" if last else f"{title}: no values yet"
    body = [svg_text(0, 14, title, weight=600)]
    if not xs:
        body.append(svg_text(width / 2, height / 2 + 10, "no values yet", anchor="middle", faint=True))
    else:
        x0, x1 = min(xs), max(xs)
        ticks = round_ticks(min(ys), max(ys), unit)
        y0, y1 = min(ticks[0], min(ys)), max(ticks[-1], max(ys))

        def px(value: float) -> float:
            return round(left + (value - x0) / ((x1 - x0) or 1) * (width - left - right), 1)

        def py(value: float) -> float:
            return round(height - bottom - (value - y0) / ((y1 - y0) or 1) * (height - top - bottom), 1)

        for tick in ticks:
            body.append(f'<path d="M{left} {py(tick)}H{width - right}" style="stroke:{RULE_COLOUR};fill:none"/>')
            body.append(svg_text(left - 6, py(tick) + 3.5, format_value(tick, unit), anchor="end", faint=True))
        body.append(svg_text(left, height - 4, f"step {x0:.0f}", faint=True))
        body.append(svg_text(width - right, height - 4, f"{x1:.0f}", anchor="end", faint=True))
        for name, value in lines:
            if math.isfinite(value):
                body.append(
                    f'<path d="M{left} {py(value)}H{width - right}" style="stroke:{TEXT_COLOUR};stroke-dasharray:5 3;'
                    f'fill:none"><title>{escape(name)}: {escape(format_value(value, unit))}</title></path>'
                )
        for index, (one, points) in enumerate(drawn):
            body.append(_line(one, [(px(a), py(b)) for a, b in points], SERIES_COLOURS[index % len(SERIES_COLOURS)]))
    body.append(_legend(names, width, legend_y))
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(label)}</title>{"".join(body)}</svg>'
    )


def round_ticks(low: float, high: float, unit: str = "", count: int = 4) -> list[float]:
    """Return ``count`` to ``count + 2`` round values that cover ``[low, high]``; bytes in binary units."""
    if high <= low:
        pad = abs(low) * 0.05 or 1.0
        low, high = low - pad, high + pad
    base = 1.0
    if unit == "bytes":
        base = float(GIB if high >= GIB else MIB)
    rough = (high - low) / base / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough) * power * base
    first = math.floor(low / step)
    return [index * step for index in range(first, math.ceil(high / step) + 1)]


def format_value(value: float, unit: str = "") -> str:
    """Return a value as axes and legends write it."""
    if unit == "bytes":
        return format_bytes(value)
    if unit == "rate":
        return format_count(value)
    if value and (abs(value) < 1e-2 or abs(value) >= 1e5):
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def svg_text(x: float, y: float, text: str, *, anchor: str = "start", faint: bool = False, weight: int = 400) -> str:
    """Return one line of escaped text in the theme's font and colour."""
    colour = FAINT_COLOUR if faint else TEXT_COLOUR
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{10 if faint else 11.5}" font-weight="{weight}" '
        f'style="fill:{colour};font-family:{FONT}">{escape(text)}</text>'
    )


def _line(one: Series, points: Sequence[tuple[float, float]], colour: str) -> str:
    if one.style == "dots":
        return "".join(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in points)
    look = {"faint": "stroke-width:1;opacity:.4", "dashed": "stroke-width:1.4;stroke-dasharray:4 3"}.get(
        one.style, "stroke-width:1.6"
    )
    path = "M" + "L".join(f"{x} {y}" for x, y in points) if points else ""
    return f'<path d="{path}" style="stroke:{colour};fill:none;{look}"/>'


def text_width(text: str, font_size: float) -> float:
    """Return the px that a text takes at most in a wide sans-serif font (DejaVu Sans: 0.62 em a letter on average)."""
    return len(text) * 0.62 * font_size


def _legend_width(names: Sequence[tuple[str, str]]) -> float:
    return sum(text_width(name, 10) + 23 for name, _ in names) if len(names) > 1 else 0.0


def _legend(names: Sequence[tuple[str, str]], width: int, y: int) -> str:
    """Return swatches and names, ending at the right border in the title's row, or in a row of their own."""
    if len(names) < 2:
        return ""
    parts, x = [], max(0.0, width - 4 - _legend_width(names))
    for name, colour in names:
        parts.append(f'<path d="M{x:.1f} {y - 3.5}h9" style="stroke:{colour};stroke-width:2.5"/>')
        parts.append(svg_text(round(x + 13, 1), y, name, faint=True))
        x += text_width(name, 10) + 23
    return "".join(parts)
