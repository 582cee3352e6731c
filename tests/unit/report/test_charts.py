"""Pictures from plain data: well-formed, complete, and with the extremes kept."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest

from workbench.events import MEMORY_CATEGORIES
from workbench.report.charts import (
    CATEGORY_COLOURS,
    Series,
    format_value,
    render_line_chart,
    render_memory_bar,
    round_ticks,
    text_width,
    thin_points,
)
from workbench.report.text import CATEGORY_LABELS
from workbench.units import GIB, MIB


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def test_every_category_has_a_colour_and_a_label() -> None:
    assert set(CATEGORY_COLOURS) == set(CATEGORY_LABELS) == set(MEMORY_CATEGORIES)
    assert len(set(CATEGORY_COLOURS.values())) == len(MEMORY_CATEGORIES)


@pytest.mark.parametrize("capacity", [4 * GIB, 16 * GIB])
def test_bar_adds_up_and_shows_the_capacity(capacity: int) -> None:
    breakdown = {"parameter": 3 * GIB, "activation": 2 * GIB, "gradient": 0, "context": GIB // 2}
    svg = render_memory_bar(breakdown, capacity, (5 * GIB, 6 * GIB))
    root = parse(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label") == f"Memory: 5.5 GiB of {capacity // GIB} GiB"
    bars = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("fill")]
    assert len(bars) == 3, "categories without bytes are not drawn"
    widths = [float(rect.get("width").rstrip("%")) for rect in bars]
    assert widths[0] == pytest.approx(1.5 * widths[1], rel=1e-3)
    assert sum(widths) <= 100
    end = max(capacity, 6 * GIB) * 1.02
    assert sum(widths) == pytest.approx(100 * 5.5 * GIB / end, rel=1e-3)
    assert f"capacity {capacity // GIB} GiB" in svg


def test_bar_of_nothing_is_drawn() -> None:
    parse(render_memory_bar({}, 0, (0, 0)))


def test_chart_draws_series_levels_and_words() -> None:
    steps = list(range(1, 101))
    loss = [3 - step / 100 for step in steps]
    svg = render_line_chart(
        "Loss <b>", [Series("raw", steps, loss), Series("eval", [50], [2.6], "dots")], lines=[("limit", 3.5)]
    )
    root = parse(svg)
    assert root.get("aria-label") == "Loss <b>: raw 2, eval 2.6"
    assert "<b>" not in svg
    assert "limit: 3.5" in svg
    assert "no values yet" in render_line_chart("Loss", [Series("raw", [], [])])


def test_chart_skips_what_was_not_measured() -> None:
    svg = render_line_chart("x", [Series("a", [1, 2, 3], [1.0, float("nan"), 2.0])])
    parse(svg)
    assert "nan" not in svg.lower()


def test_thinning_keeps_every_extreme() -> None:
    y = [0.0] * 10_000
    y[5000], y[7777] = 9.0, -9.0
    kept = thin_points(range(10_000), y, 600)
    assert len(kept) <= 600
    assert (5000.0, 9.0) in kept
    assert (7777.0, -9.0) in kept
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


@pytest.mark.parametrize(
    ("low", "high", "unit"), [(0, 1, ""), (2.31, 2.34, ""), (5, 5, ""), (0, 3.3 * GIB, "bytes"), (1e-9, 3e-4, "")]
)
def test_ticks_cover_the_range_with_round_steps(low: float, high: float, unit: str) -> None:
    ticks = round_ticks(low, high, unit)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 3 <= len(ticks) <= 8
    steps = {round((b - a) / (ticks[1] - ticks[0]), 6) for a, b in itertools.pairwise(ticks)}
    assert steps == {1.0}


def test_bytes_are_ticked_in_binary_units() -> None:
    assert all(tick % (GIB // 2) == 0 for tick in round_ticks(0, 3.3 * GIB, "bytes"))
    assert all(tick % MIB == 0 for tick in round_ticks(0, 300 * MIB, "bytes"))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2.3456, "", "2.35"), (2e-4, "", "2e-4"), (1.5e-5, "", "1.5e-5"), (1234, "", "1234"), (0, "", "0"),
        (1.5 * GIB, "bytes", "1.5 GiB"), (8123, "rate", "8.123k"),
    ],
)  # fmt: skip
def test_values_are_short(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


def test_a_long_legend_takes_a_row_of_its_own_so_that_no_names_overlap() -> None:
    def rows(names: list[str]) -> tuple[set[float], list[float]]:
        series = [Series(name, [0.0, 1.0], [1.0, 2.0]) for name in names]
        svg = render_line_chart("Memory", series)
        found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)</text>', svg)
        legend = [(float(x), float(y), text) for x, y, text in found if text in names]
        return {y for _, y, _ in legend}, [x for x, _, _ in legend]

    assert rows(["raw", "mean"])[0] == {14.0}
    heights, starts = rows(["peak", "at rest", "process", "predicted peak"])
    assert heights == {28.0}
    widths = [text_width(name, 10) for name in ("peak", "at rest", "process")]
    assert all(after - before >= width + 13 for before, after, width in zip(starts, starts[1:], widths, strict=False))
