from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench.estimate.explanation import Explanation, Gap, Instant, MemoryPicture, Share
from workbench.report.explanation import (
    explanation_figure,
    explanation_sentences,
    render_explanation,
    render_explanation_html,
    render_explanation_svg,
    render_holders,
)
from workbench.units import GIB, MIB


def picture() -> MemoryPicture:
    keys = [("parameter", ""), ("activation", "layers.*.<mlp>"), ("activation", "layers.*.attn")]
    holders = np.array([[1, 0, 0], [1, 1, 1], [1, 3, 2], [1, 1, 0]], dtype=np.int64) * GIB
    return MemoryPicture(
        bytes_by_category={"parameter": holders[:, 0].tolist(), "activation": holders[:, 1:].sum(axis=1).tolist()},
        reserved_bytes=[GIB, 4 * GIB, 7 * GIB, 7 * GIB],
        phases=[(0, "load"), (1, "forward"), (2, "backward")],
        steps=[(0, None), (1, 0)],
        peak=2,
        next_highest=1,
        window=(1, 3),
        keys=keys,
        holders=holders,
    )


def estimate() -> Any:
    peak = Instant(2, "backward", 0, "layers.*.attn", "aten.bmm", 6 * GIB, repeats=3)
    after = Instant(1, "forward", 0, "layers.*.<mlp>", "aten.mm", 3 * GIB)
    gaps = [Gap("holes", GIB, "Free pieces."), Gap("rounding", MIB, "rounded.")]
    shares = [Share("activation", 5 * GIB, 4)]
    modules, operators = [Share("", GIB, 1)], [Share("aten.bmm", GIB, 1)]
    why = Explanation(peak, after, shares, modules, operators, 2.0 * MIB, 0.0, gaps, picture())
    memory = SimpleNamespace(
        peak_reserved_bytes=7 * GIB, peak_allocated_bytes=6 * GIB, process_bytes=8 * GIB,
        fragmentation_bytes=GIB, fragmentation_cause="aten.mm asked for 2 GiB.", smallest_capacity_bytes=7 * GIB,
    )  # fmt: skip
    return SimpleNamespace(explanation=why, memory=memory)


def test_sentences_say_peak_next_slope_and_reasons() -> None:
    sentences = explanation_sentences(estimate())
    assert sentences[0] == (
        "The peak of 6 GiB allocated is in backward of step 1, in layers.*.attn, aten.bmm, 3 times."
    )
    assert sentences[1].endswith("saves at most 3 GiB.")
    assert "adds 2 MiB" in sentences[2]
    assert "adds nothing" in sentences[3]
    assert sentences[4] == "When most is reserved, 1 GiB of it is in no use: aten.mm asked for 2 GiB."
    assert sentences[5].startswith("The smallest device it survives on has 7 GiB; below 8 GiB the allocator")
    assert sentences[-2:] == ["1 GiB more is reserved than allocated:", "1 GiB: Free pieces."]
    text = render_explanation(estimate())
    assert "outside the model" in text
    assert "activations" in text
    with pytest.raises(ValueError, match="explain_run"):
        explanation_sentences(SimpleNamespace(explanation=None))  # type: ignore[arg-type]  # a stand-in


def test_html_is_escaped() -> None:
    html = render_explanation_html(estimate())
    assert "&lt;mlp&gt;" in html
    assert html.count("<li>") == 1
    assert "<mlp>" not in render_holders(picture(), 2, "activation")


def test_holders_of_a_band_and_of_all() -> None:
    html = render_holders(picture(), 2, "activation")
    assert "activations</b> in backward, step 1: 5 GiB" in html
    assert html.index("mlp") < html.index("attn")
    assert "weights" not in html
    assert "weights" in render_holders(picture(), 2, None)
    assert "and 2 more" in render_holders(picture(), 2, None, limit=1)


def test_the_picture_opens_on_the_step_and_marks_both_instants() -> None:
    figure = explanation_figure(picture(), 7 * GIB)
    assert [trace.get("meta") for trace in figure["data"]] == ["parameter", "activation", None]
    assert figure["data"][1]["y"] == [0, 2, 5, 1]
    assert "&lt;mlp&gt;" in figure["data"][1]["text"][2]
    layout = figure["layout"]
    assert layout["xaxis"]["range"] == [1, 3]
    marks = {note["text"]: note["x"] for note in layout["annotations"]}
    assert marks["peak 6 GiB"] == 2
    assert marks["next highest 3 GiB"] == 1
    assert any(shape["y0"] == 7 for shape in layout["shapes"])
    pytest.importorskip("plotly.graph_objects").Figure(figure)


def test_svg_is_well_formed_and_says_the_peak() -> None:
    root = ElementTree.fromstring(render_explanation_svg(picture()))
    assert root.get("aria-label") == "Memory over the step with the peak: 6 GiB in backward"
    assert len(root.findall("{http://www.w3.org/2000/svg}polygon")) == 2
