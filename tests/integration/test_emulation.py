"""A few of the random recipes of ``benchmarks/emulation.py``: what is predicted to fit finishes, the rest runs out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.emulation import draw, grade


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_seed_draws_the_same_run_each_time() -> None:
    assert draw(3) == draw(3)
    assert len({draw(seed).name.split()[1] for seed in range(40)}) == 6


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_prediction_and_emulation_agree(seed: int) -> None:
    rows = grade(seed)
    assert [row["expected_to_finish"] for row in rows] == [True, False]
    assert [row["finished"] for row in rows] == [True, False], rows
