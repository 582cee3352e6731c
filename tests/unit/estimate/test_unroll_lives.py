"""Copies of a layer's storages begin and end as the one they are copied from, or the trace is not extended."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.estimate.unroll import NotUniformError, _require_lives

# The layer before, the template, two copies, the last.
ROWS = np.array([[0], [1], [3], [4], [2]])


def test_equal_lives_pass() -> None:
    _require_lives(np.array([0, 1, 3, 4, 2, ~2, ~4, ~3, ~1, ~0]), ROWS)


@pytest.mark.parametrize(
    "events",
    [[0, 1, 3, 4, 2, ~2, ~4, ~4, ~1, ~0], [0, 1, 3, 3, 2, ~2, ~4, ~3, ~1, ~0]],
    ids=["one ends twice, another never", "one begins twice"],
)
def test_a_copy_that_lives_otherwise_is_refused(events: list[int]) -> None:
    with pytest.raises(NotUniformError, match="begin and end alike"):
        _require_lives(np.array(events), ROWS)
