"""Every optimizer's state is predicted to the byte: the estimate against the storages that a real step leaves."""

from __future__ import annotations

import pytest
import torch

from benchmarks.optimizers import PEAK_TOLERANCE, play
from workbench.recipe.parts import OPTIMIZERS


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_state_and_peak_are_predicted(optim: str) -> None:
    row = play(optim)
    assert row.estimated_state_bytes == row.state_bytes
    assert (row.state_bytes == 0) == (optim == "sgd")
    assert (row.host_bytes > 0) == (optim == "paged_adamw_8bit")
    if row.peak_bytes is not None:
        assert row.estimated_peak_bytes == pytest.approx(row.peak_bytes, rel=PEAK_TOLERANCE)
