from __future__ import annotations

import numpy as np
import pytest

from workbench.components.padding import length_histogram, padding_shares


def test_shares_of_a_case_counted_by_hand() -> None:
    shares = padding_shares(np.array([8, 8, 2, 2]), max_length=10, batch_size=2, seed=0)
    assert shares.group_by_length == 0
    assert shares.max_length == pytest.approx(1 - 20 / 40)
    assert shares.packing == 0  # 8 + 2 twice
    assert shares.longest in (0, pytest.approx(1 - 20 / 32))


def test_a_last_batch_that_is_not_full_counts_as_it_is() -> None:
    assert padding_shares(np.array([4, 4, 4]), max_length=4, batch_size=2, seed=0).longest == 0


def test_order_of_choices_on_mixed_lengths() -> None:
    lengths = np.random.default_rng(0).integers(1, 512, size=1000)
    shares = padding_shares(lengths, max_length=512, batch_size=4, seed=0)
    assert 0 <= shares.packing < shares.longest < shares.max_length < 1
    assert shares.group_by_length < shares.longest


@pytest.mark.parametrize("lengths", [[1], [3, 3, 3], [1, 500], list(range(1, 700))])
def test_histogram_counts_every_sample_once(lengths: list[int]) -> None:
    histogram = length_histogram(np.array(lengths))
    assert sum(histogram.counts) == len(lengths)
    assert len(histogram.edges) == len(histogram.counts) + 1 <= 42
    for index, count in enumerate(histogram.counts):
        inside = [n for n in lengths if histogram.edges[index] <= n < histogram.edges[index + 1]]
        last = index == len(histogram.counts) - 1
        assert count == len(inside) + (lengths.count(int(histogram.edges[-1])) if last else 0)
