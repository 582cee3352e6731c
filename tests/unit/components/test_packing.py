from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.components.packing import join_samples, pack_lengths


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), max_size=80))
def test_every_sample_is_packed_once_and_fits(lengths: list[int]) -> None:
    bins = pack_lengths(lengths, 32)
    assert sorted(index for group in bins for index in group) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in group) for group in bins]
    assert all(total <= 32 for total in sums)
    # Two half-empty sequences would have been joined.
    assert sum(total <= 16 for total in sums) <= 1


def test_best_fit_fills_the_fullest_that_still_fits() -> None:
    assert pack_lengths([10, 6, 3, 7], 10) == [[0], [3, 2], [1]]


def test_too_long_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="33 tokens does not fit into 32"):
        pack_lengths([33], 32)


def test_many_samples_are_packed_in_a_blink() -> None:
    import time

    lengths = np.random.default_rng(0).integers(1, 2048, size=50_000)
    start = time.thread_time()
    bins = pack_lengths(lengths, 2048)
    assert time.thread_time() - start < 2
    assert lengths.sum() / (len(bins) * 2048) > 0.98


def test_positions_begin_anew_and_no_sample_is_predicted_from_its_neighbour() -> None:
    first = (np.array([5, 6, 7], dtype=np.int32), np.array([5, 6, 7], dtype=np.int32))
    second = (np.array([8, 9], dtype=np.int32), np.array([8, 9], dtype=np.int32))
    ids, labels, positions = join_samples([first, second])
    assert ids.tolist() == [5, 6, 7, 8, 9]
    assert labels.tolist() == [-100, 6, 7, -100, 9]
    assert positions.tolist() == [0, 1, 2, 0, 1]
