"""Plotly pictures from plain data: complete, bounded in size, accepted by plotly."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from workbench.report.figures import length_figure, render_length_histogram


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


def test_plotly_takes_the_figures() -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    graph_objects.Figure(length_figure([1, 2, 3], 2))
