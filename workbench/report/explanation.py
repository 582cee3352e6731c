"""Why a run takes the memory it takes, in words, as a table and as a picture. Plain data in."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ..estimate.estimate import Estimate
from ..estimate.explanation import Explanation, Instant, MemoryPicture, Share
from ..events import MEMORY_CATEGORIES
from ..units import GIB, MIB, format_bytes
from .charts import CATEGORY_COLOURS, RULE_COLOUR, TEXT_COLOUR, svg_text
from .figures import NEUTRAL, plotly_layout
from .tables import render_table
from .text import CATEGORY_LABELS, fragmentation_sentences

MARK = "#c8504b"
SHOWN_SHARES = 8
HOVER_LABEL = {"bgcolor": "rgba(32,32,32,0.92)", "font": {"color": "#f2f2f2", "size": 10}}
HOVER_MODULES = 1


def describe_place(instant: Instant) -> str:
    """Return where an instant is, e.g. ``"backward of step 2, in model, aten._log_softmax_backward_data"``."""
    step = f" of step {instant.step + 1}" if instant.step is not None else ""
    return f"{instant.phase}{step}, in {instant.module or 'the loop'}, {instant.operator}"


def explanation_sentences(estimate: Estimate) -> list[str]:
    """Return the explanation as sentences, the most important first.

    Raises:
        ValueError: The estimate has no explanation; ``explain_run`` makes one.
    """
    explanation = _require(estimate)
    peak, after = explanation.peak, explanation.next_highest
    times = f", {peak.repeats} times" if peak.repeats > 1 else ""
    sentences = [f"The peak of {format_bytes(peak.allocated_bytes)} allocated is in {describe_place(peak)}{times}."]
    if after is not None:
        less = format_bytes(peak.allocated_bytes - after.allocated_bytes)
        sentences.append(
            f"Next comes {format_bytes(after.allocated_bytes)} in {describe_place(after)}: taking away the cause "
            f"of the peak alone saves at most {less}."
        )
    if explanation.bytes_per_token is not None:
        sentences.append(
            f"At this length each token more in every micro-batch adds {format_bytes(explanation.bytes_per_token)}."
        )
    if explanation.bytes_per_sample is not None:
        sentences.append(
            f"One sample more in each micro-batch adds {format_bytes(explanation.bytes_per_sample)}."
            if explanation.bytes_per_sample >= MIB
            else "One sample more in each micro-batch adds nothing: the peak is not in training's batch."
        )
    memory = estimate.memory
    sentences += fragmentation_sentences(memory)
    gap = memory.peak_reserved_bytes - memory.peak_allocated_bytes
    rounding = [item for item in explanation.gaps if item.kind == "rounding"]
    sentences += [f"Of what is allocated, {format_bytes(item.num_bytes)}: {item.sentence}" for item in rounding]
    reasons = [item for item in explanation.gaps if item.kind != "rounding"]
    if reasons:
        sentences.append(f"{format_bytes(gap)} more is reserved than allocated:")
        sentences += [f"{format_bytes(item.num_bytes)}: {item.sentence}" for item in reasons]
    return sentences


def render_explanation(estimate: Estimate) -> str:
    """Return the explanation as text for a terminal."""
    explanation = _require(estimate)
    parts = ["\n".join(explanation_sentences(estimate))]
    tables = (
        ("category", explanation.by_category),
        ("module", explanation.by_module),
        ("operator", explanation.by_operator),
    )
    for noun, shares in tables:
        rows = [(_share_name(noun, share), format_bytes(share.num_bytes), share.count) for share in shares]
        parts.append(render_table((f"at the peak, by {noun}", "bytes", "storages"), rows[:SHOWN_SHARES]))
    return "\n\n".join(parts)


def render_explanation_html(estimate: Estimate) -> str:
    """Return the sentences as HTML; the reasons for what is reserved as a list below their sentence."""
    sentences = explanation_sentences(estimate)
    count = sum(item.kind != "rounding" for item in _require(estimate).gaps)
    lead = sentences[: len(sentences) - count] if count else sentences
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences[len(lead) :])
    text = "".join(f"<p>{escape(sentence)}</p>" for sentence in lead)
    return f'<div class="wb-why">{text}{f"<ul>{items}</ul>" if items else ""}</div>'


def render_holders(picture: MemoryPicture, point: int, category: str | None, limit: int = 12) -> str:
    """Return who lives at an instant as an HTML table, one row a module."""
    holders = picture.holders_at(point, category)
    total = sum(size for _, _, size in holders)
    step = picture.step_at(point)
    place = picture.phase_at(point) + (f", step {step + 1}" if step is not None else "")
    what = CATEGORY_LABELS.get(category, category) if category else "all of it"
    rows = "".join(
        f'<tr><td><i class="wb-dot" style="background:{CATEGORY_COLOURS[kind]}"></i> '
        f"{escape(CATEGORY_LABELS[kind])}</td><td>{escape(module or 'outside the model')}</td>"
        f"<td>{format_bytes(size)}</td></tr>"
        for kind, module, size in holders[:limit]
    )
    more = len(holders) - limit
    rest = f"<p>and {more} more</p>" if more > 0 else ""
    head = f"<b>{escape(what)}</b> in {escape(place)}: {format_bytes(total)}"
    body = f"<table><tr><th>category</th><th>module</th><th>bytes</th></tr>{rows}</table>" if rows else ""
    return f'<div class="wb-holders" role="status"><p>{head}</p>{body}{rest}</div>'


def explanation_figure(picture: MemoryPicture, capacity_bytes: int | None = None) -> dict[str, Any]:
    """Return a plotly picture: memory by category, the peak and the next-highest instant marked.

    It opens on the step with the peak; buttons switch to the whole run. Hovering names the largest holders of a band.
    """
    names, totals = _names(picture), _totals(picture)
    unit, scale = ("GiB", GIB) if max(totals, default=0) >= GIB else ("MiB", MIB)
    x = list(range(picture.num_points))
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "memory",
            "line": {"width": 0.5, "color": CATEGORY_COLOURS[name], "shape": "hv"},
            "name": CATEGORY_LABELS.get(name, name),
            "meta": name,
            "x": x,
            "y": [round(size / scale, 4) for size in picture.bytes_by_category[name]],
            "text": _hover_texts(picture, name),
            "hovertemplate": f"%{{y:.3g}} {unit}%{{text}}",
        }
        for name in names
    ]
    if len(picture.reserved_bytes):
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "line": {"width": 1.5, "dash": "dot", "color": NEUTRAL},
                "name": "reserved",
                "x": x,
                "y": [round(size / scale, 4) for size in picture.reserved_bytes],
                "hovertemplate": f"%{{y:.4g}} {unit}",
            }
        )
    layout = plotly_layout("instants of the run, in order", unit)
    layout |= {"height": 330, "hovermode": "x unified", "hoverlabel": HOVER_LABEL, "showlegend": False}
    layout["margin"] = {"l": 56, "r": 16, "t": 64, "b": 40}
    layout["xaxis"] |= {"range": list(picture.window), "showticklabels": False}
    layout["shapes"] = [_rule(start, 0.6 if name == "forward" else 0.3) for start, name in picture.phases]
    layout["annotations"] = [*_phase_labels(picture), *_marks(picture, totals, scale, unit)]
    layout["updatemenus"] = [_zooms(picture)]
    if capacity_bytes and capacity_bytes < 1.3 * max([*totals, *picture.reserved_bytes], default=0):
        level = capacity_bytes / scale
        line = {"color": MARK, "dash": "dash", "width": 1}
        layout["shapes"].append(
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": level, "y1": level, "line": line}
        )
    return {"data": data, "layout": layout}


def render_explanation_svg(picture: MemoryPicture, size: tuple[int, int] = (640, 220)) -> str:
    """Return the same picture as SVG, the step with the peak only, for fronts without plotly."""
    width, height = size
    top, bottom = 34, 18
    begin, end = picture.window
    totals = _totals(picture)
    highest = max(totals[begin : end + 1], default=1) or 1

    def px(point: int) -> float:
        return round((point - begin) / max(1, end - begin) * width, 1)

    def py(num_bytes: float) -> float:
        return round(height - bottom - num_bytes / highest * (height - top - bottom), 1)

    body, floor = [], [0] * (end - begin + 1)
    for name in _names(picture):
        values = picture.bytes_by_category[name][begin : end + 1]
        ceiling = [low + value for low, value in zip(floor, values, strict=True)]
        up = " ".join(f"{px(begin + i)},{py(value)}" for i, value in enumerate(ceiling))
        down = " ".join(f"{px(begin + i)},{py(floor[i])}" for i in reversed(range(len(floor))))
        label = escape(CATEGORY_LABELS.get(name, name))
        body.append(f'<polygon points="{up} {down}" fill="{CATEGORY_COLOURS[name]}"><title>{label}</title></polygon>')
        floor = ceiling
    for start, name in picture.phases:
        if begin <= start <= end and (start == begin or name != "recompute"):
            body.append(f'<path d="M{px(start)} {top}V{height - bottom}" style="stroke:{RULE_COLOUR}"/>')
    marks = [(picture.peak, "peak"), (picture.next_highest, "next")]
    for point, word in marks:
        if begin <= point <= end:
            x = px(point)
            body.append(f'<path d="M{x} {top - 6}V{height - bottom}" style="stroke:{MARK};stroke-dasharray:4 3"/>')
            anchor = "end" if x > width / 2 else "start"
            y = 12 if word == "peak" else 26
            body.append(
                svg_text(x, y, f"{word} {format_bytes(totals[point])}, {picture.phase_at(point)}", anchor=anchor)
            )
    body.append(f'<path d="M0 {height - bottom}H{width}" style="stroke:{TEXT_COLOUR}"/>')
    label = (
        f"Memory over the step with the peak: {format_bytes(totals[picture.peak])} in {picture.phase_at(picture.peak)}"
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(label)}</title>{"".join(body)}</svg>'
    )


def _require(estimate: Estimate) -> Explanation:
    if estimate.explanation is None:
        raise ValueError("This estimate has no explanation. Make it with explain_run in place of estimate_run.")
    return estimate.explanation


def _share_name(noun: str, share: Share) -> str:
    if noun == "category":
        return CATEGORY_LABELS.get(share.name, share.name)
    return share.name or "outside the model"


def _names(picture: MemoryPicture) -> list[str]:
    return [name for name in MEMORY_CATEGORIES if name in picture.bytes_by_category]


def _totals(picture: MemoryPicture) -> list[int]:
    columns = [picture.bytes_by_category[name] for name in _names(picture)]
    return [sum(values) for values in zip(*columns, strict=True)]


def _hover_texts(picture: MemoryPicture, category: str) -> list[str]:
    """Return the largest holders of a band at each point."""
    texts = []
    for point in range(picture.num_points):
        holders = picture.holders_at(point, category)[:HOVER_MODULES]
        texts.append("".join(f", most in {escape(_short(module))}" for _, module, _ in holders))
    return texts


def _short(module: str) -> str:
    """Return the end of a module's path: a hover label has to leave the picture in sight."""
    return ".".join(module.split(".")[-2:]) or "the loop"


def _rule(start: int, width: float) -> dict[str, Any]:
    line = {"color": NEUTRAL, "width": width}
    return {"type": "line", "x0": start, "x1": start, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _phase_labels(picture: MemoryPicture) -> list[dict[str, Any]]:
    labels: Sequence[tuple[int, str]] = picture.phases
    shown: list[dict[str, Any]] = []
    last = -10.0
    span = max(1, picture.window[1] - picture.window[0])
    for start, name in labels:
        inside = picture.window[0] <= start <= picture.window[1]
        if name == "recompute" or start - last < span * 0.07 or not inside:
            continue
        last = start
        shown.append(
            {
                "x": start,
                "yref": "paper",
                "y": 1,
                "yanchor": "bottom",
                "xanchor": "left",
                "text": escape(name),
                "showarrow": False,
                "font": {"size": 10, "color": NEUTRAL},
            }
        )
    return shown


def _marks(picture: MemoryPicture, totals: list[int], scale: int, unit: str) -> list[dict[str, Any]]:
    marks = []
    for point, word, shift in ((picture.peak, "peak", -30), (picture.next_highest, "next highest", -12)):
        if point < 0:
            continue
        is_right = point > sum(picture.window) / 2
        marks.append(
            {
                "x": point,
                "y": totals[point] / scale,
                "text": f"{word} {totals[point] / scale:.3g} {unit}",
                "ax": -46 if is_right else 46,
                "ay": shift,
                "arrowcolor": MARK,
                "arrowwidth": 1.5,
                "font": {"color": MARK, "size": 11},
            }
        )
    return marks


def _zooms(picture: MemoryPicture) -> dict[str, Any]:
    views = (("peak step", list(picture.window)), ("whole run", [0, picture.num_points - 1]))
    return {
        "type": "buttons",
        "direction": "right",
        "x": 1,
        "xanchor": "right",
        "y": 1.28,
        "yanchor": "top",
        "pad": {"t": 0, "r": 0},
        "font": {"size": 10, "color": NEUTRAL},
        "bgcolor": "rgba(128,128,128,0.12)",
        "buttons": [{"label": label, "method": "relayout", "args": [{"xaxis.range": reach}]} for label, reach in views],
    }
