"""Spikes that repeat are a finding that names their rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.diagnose import diagnose_run
from workbench.diagnose.spikes import find_spikes
from workbench.events import METRIC_COLUMNS


def spike(step: int, rows: list[int], loss: float = 9.0, policy: str = "keep") -> dict[str, Any]:
    texts = [f"text {row}" for row in rows]
    return {"step": step, "loss": loss, "median": 2.0, "limit": 3.0, "rows": rows, "texts": texts, "policy": policy}


def test_one_or_two_are_chance() -> None:
    assert find_spikes([spike(30, [1]), spike(40, [1])]) is None


def test_rows_that_come_again_are_named_first() -> None:
    finding = find_spikes([spike(30, [1, 8]), spike(40, [8, 3], loss=12.0), spike(50, [4, 5])])
    assert finding is not None
    assert (finding.cause, finding.where) == ("loss.spikes", {"step": 40, "rows": [8]})
    assert "8 ('text 8') were in several" in finding.summary
    assert finding.evidence["steps"] == [30, 40, 50]
    assert finding.fixes[-1].changes == {"policies.on_spike": "skip"}


def test_without_repeats_the_highest_spike_is_named_and_a_policy_is_not_proposed_twice() -> None:
    finding = find_spikes([spike(30, [1], policy="skip"), spike(40, [3], 12.0, "skip"), spike(50, [4], policy="skip")])
    assert finding is not None
    assert finding.where["rows"] == [3]
    assert finding.evidence["num_skipped"] == 3
    assert not any(fix.changes for fix in finding.fixes)


class _Empty:
    def column(self, name: str) -> NDArray[np.float64]:
        assert name in METRIC_COLUMNS
        return np.array([])


def test_the_doctors_of_a_run_tell_it() -> None:
    spikes = [spike(step, [8]) for step in (30, 40, 50)]
    assert [finding.cause for finding in diagnose_run(_Empty(), spikes=spikes)] == ["loss.spikes"]
    assert diagnose_run(_Empty()) == []
