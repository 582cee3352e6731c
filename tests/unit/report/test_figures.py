"""Plotly pictures from plain data: complete, bounded in size, accepted by plotly."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from workbench.events import Timeline
from workbench.report.figures import length_figure, render_length_histogram, timeline_figure
from workbench.units import GIB


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def test_histograms_count_every_sample() -> None:
    lengths = [5, 5, 80, 300, 512]
    figure = length_figure(lengths, 128)
    assert sum(figure["data"][0]["y"]) == 5
    assert figure["layout"]["shapes"][0]["x0"] == 128
    counts = re.findall(r"tokens: (\d+) samples", render_length_histogram(lengths, 128))
    assert sum(map(int, counts)) == 5
    parse(render_length_histogram(lengths, 128))
    parse(render_length_histogram([], 128))
    assert length_figure([], 128)["data"][0]["y"] == []


def test_timeline_keeps_the_peak_and_marks_phases() -> None:
    count = 50_000
    parameter, activation = [GIB] * count, [0] * count
    activation[31_234] = 3 * GIB
    timeline = Timeline(
        {"activation": activation, "parameter": parameter},
        [(0, "load"), (10, "forward"), (30_000, "backward")],
        peak_index=31_234,
    )
    figure = timeline_figure(timeline, 8 * GIB)
    assert [trace["name"] for trace in figure["data"]] == ["weights", "activations"], "in the order of the bar"
    assert all(len(trace["x"]) <= 2000 for trace in figure["data"])
    assert max(figure["data"][1]["y"]) == 3
    texts = [note["text"] for note in figure["layout"]["annotations"]]
    assert texts == ["load", "backward"], "labels that would collide are left out"
    assert len(figure["layout"]["shapes"]) == 4


def test_timeline_of_nothing() -> None:
    assert timeline_figure(Timeline({}, []))["data"] == []


def test_plotly_takes_the_figures() -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    timeline = Timeline({"parameter": [1, 2]}, [(0, "load")], reserved_bytes=[2, 2])
    for figure in (length_figure([1, 2, 3], 2), timeline_figure(timeline, 4)):
        graph_objects.Figure(figure)
