"""Pictures that people explore, as plotly JSON: plain dictionaries ``{"data": ..., "layout": ...}``.

plotly itself is not imported; ``plotly.graph_objects.Figure(figure)`` takes them, and JupyterLab draws them as is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from .charts import CATEGORY_COLOURS, svg_text

# Plotly cannot read CSS variables; this grey has a contrast of at least 4.4 on white and on near-black.
NEUTRAL = "#7c7c7c"


def length_figure(lengths: Sequence[int], max_length: int) -> dict[str, Any]:
    """Return a plotly histogram of tokens per sample with a line at ``max_length``."""
    layout = plotly_layout("tokens per sample", "samples")
    layout["shapes"] = [
        {
            "type": "line",
            "x0": max_length,
            "x1": max_length,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"color": "#c8504b", "dash": "dash", "width": 2},
        }
    ]
    layout["annotations"] = [
        {
            "x": max_length,
            "yref": "paper",
            "y": 1.02,
            "yanchor": "bottom",
            "text": f"max_length {max_length}",
            "showarrow": False,
            "font": {"color": NEUTRAL},
        }
    ]
    counts, edges = _histogram([int(value) for value in lengths])
    centres = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    bars = {
        "type": "bar",
        "x": centres,
        "y": counts,
        "width": [(edges[1] - edges[0]) * 0.95] * len(counts) if counts else [],
        "customdata": [[low, high] for low, high in itertools.pairwise(edges)],
        "hovertemplate": "%{customdata[0]:.0f} to %{customdata[1]:.0f} tokens: %{y} samples<extra></extra>",
        "marker": {"color": CATEGORY_COLOURS["parameter"]},
        "name": "samples",
    }
    layout["bargap"] = 0
    return {"data": [bars], "layout": layout}


def render_length_histogram(lengths: Sequence[int], max_length: int, size: tuple[int, int] = (420, 150)) -> str:
    """Return the same histogram as SVG, for fronts without plotly."""
    width, height = size
    counts, edges = _histogram([int(value) for value in lengths])
    label = f"Tokens per sample of {len(lengths)} samples; max_length {max_length}"
    body = []
    if counts:
        end = max(edges[-1], max_length) * 1.04
        tallest = max(counts)
        for count, (low, high) in zip(counts, itertools.pairwise(edges), strict=True):
            tall = count / tallest * (height - 40)
            body.append(
                f'<rect x="{low / end * width:.1f}" y="{height - 20 - tall:.1f}" '
                f'width="{max((high - low) / end * width - 1, 0.5):.1f}" height="{tall:.1f}" '
                f'fill="{CATEGORY_COLOURS["parameter"]}">'
                f"<title>{low:.0f} to {high:.0f} tokens: {count} samples</title></rect>"
            )
        limit = max_length / end * width
        body.append(
            f'<path d="M{limit:.1f} 14V{height - 20}" style="stroke:#c8504b;stroke-width:2;stroke-dasharray:5 3"/>'
        )
        body.append(
            svg_text(min(limit, width - 4), 10, f"max_length {max_length}", anchor="end" if limit > 90 else "start")
        )
        body.append(svg_text(0, height - 5, "0", faint=True))
        body.append(svg_text(width, height - 5, f"{end:.0f} tokens", anchor="end", faint=True))
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(label)}</title>{"".join(body)}</svg>'
    )


def plotly_layout(x_title: str, y_title: str) -> dict[str, Any]:
    """Return the looks that all plotly pictures share."""
    axis = {"gridcolor": "rgba(128,128,128,0.25)", "zerolinecolor": "rgba(128,128,128,0.4)", "color": NEUTRAL}
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": NEUTRAL, "size": 12},
        "height": 260,
        "autosize": True,
        "margin": {"l": 56, "r": 16, "t": 40, "b": 44},
        "xaxis": {**axis, "title": {"text": x_title}},
        "yaxis": {**axis, "title": {"text": y_title}, "rangemode": "tozero"},
        "showlegend": False,
        "legend": {"font": {"color": NEUTRAL}},
    }


def _histogram(values: Sequence[int], num_bins: int = 40) -> tuple[list[int], list[float]]:
    if not values:
        return [], [0.0]
    width = max(1, math.ceil(max(values) / num_bins))
    counts = [0] * (max(values) // width + 1)
    for value in values:
        counts[value // width] += 1
    return counts, [float(index * width) for index in range(len(counts) + 1)]
