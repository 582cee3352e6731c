from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from workbench.hardware import probes
from workbench.hardware.overhead import count_operators


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", list(probes.OPERATORS))
def test_every_operator_runs_at_every_size_of_row(name: str) -> None:
    for num_elements in (probes.SMALL, 4 * probes.ROW):
        seconds, moved = probes._operator_s(name, num_elements, time.process_time, 0.0, ring_bytes=0)
        assert seconds > 0
        assert moved >= 4 * num_elements * 0.5


def test_more_work_takes_longer() -> None:
    (_, small), (_, large) = (
        (size, probes._operator_s("tanh", size, time.process_time, 0.01, ring_bytes=0)[0]) for size in (2**12, 2**18)
    )
    assert large > 8 * small


def test_products_cover_the_grid_in_each_layout() -> None:
    points = probes.product_points(torch.float32, "tn", time.process_time, 0.0005, (8, 16))
    assert {point[:3] for point in points} == {(a, b, c) for a in (8, 16) for b in (8, 16) for c in (8, 16)}
    assert all(point[3] > 0 for point in points)


def test_a_call_longer_than_the_limit_is_timed_once() -> None:
    calls = []

    def clock() -> float:
        return float(len(calls))

    assert probes.shortest(lambda: calls.append(1), clock, 10.0) == 1.0
    assert len(calls) == 1


def test_views_and_empty_memory_are_no_operators_that_work() -> None:
    value = torch.ones(4, 4)

    def work() -> None:
        torch.empty(3)
        value.t().view(2, 8)[0]
        value.add_(1.0)
        _ = value * 2

    with pytest.raises(RuntimeError):  # a transposed matrix has no such view
        count_operators(work)

    def fine() -> None:
        torch.empty(3)
        value.t()[0].unsqueeze(0)
        value.add_(1.0)
        _ = value * 2

    assert count_operators(fine) == 2
