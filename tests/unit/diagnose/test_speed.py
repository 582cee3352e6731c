"""The speed doctor on recorded counts: each slowness is named with its gain, and healthy runs are not."""

from collections import deque
from typing import Any

import pytest

from workbench.diagnose.speed import SpeedEvidence, find_speed_faults
from workbench.units import GIB, MIB


def causes(**changes: Any) -> list[str]:
    seen = {"step_s": deque([0.05] * 20), **changes}
    return [finding.cause for finding in find_speed_faults(SpeedEvidence(**seen))]


def padded(*, rows: int = 4, real: int, longest: int, width: int, steps: int = 10) -> dict[str, Any]:
    return {"slots": deque([rows * width] * steps), "real": deque([real] * steps),
            "longest": deque([longest] * steps), "widths": deque([width] * steps)}  # fmt: skip


def test_a_healthy_run_is_silent() -> None:
    assert causes(**padded(real=90, longest=25, width=25)) == []


def test_padding_says_what_each_way_out_gives() -> None:
    (finding,) = find_speed_faults(SpeedEvidence(**padded(real=80, longest=25, width=100)))
    assert finding.cause == "speed.padding"
    assert finding.evidence["dynamic_speedup"] == pytest.approx(4.0)
    assert finding.evidence["packing_speedup"] == pytest.approx(5.0)
    (finding,) = find_speed_faults(SpeedEvidence(**padded(real=130, longest=100, width=100)))
    assert finding.cause == "speed.padding" and finding.fixes[0].changes == {"data.packing": True}


SLOW = {
    "speed.gc_every_step": {"gc_s": 0.2, "num_gc": 20},
    "speed.empty_cache_every_step": {"num_empty_cache": 20},
    "speed.checkpointing_in_eval": {"num_eval_forwards": 4, "num_recomputed": 4},
    "speed.data_wait": {"data_s": 0.5},
    "speed.recompilation": {"compiled_at": [1, 2, 4, 6, 8, 9, 12]},
    "speed.swap": {"num_paged_in": 4000},
    "speed.emulated_bf16": {"emulated_bf16": "Tesla T4"},
    "speed.checkpointing_unneeded": {"recomputes": True, "peak_bytes": 3 * GIB, "capacity_bytes": 16 * GIB},
}


@pytest.mark.parametrize("cause", SLOW)
def test_each_slowness_is_named(cause: str) -> None:
    assert causes(**SLOW[cause]) == [cause]


@pytest.mark.parametrize(
    "changes",
    [
        {"gc_s": 0.01, "num_gc": 20},
        {"num_empty_cache": 2},
        {"num_eval_forwards": 4},
        {"data_s": 0.2},
        {"compiled_at": [1] * 30 + [10] * 30},
        {"num_paged_in": 300, "swap_bytes": 10 * MIB},
        {"recomputes": True, "peak_bytes": 12 * GIB, "capacity_bytes": 16 * GIB},
        {"peak_bytes": 3 * GIB, "capacity_bytes": 16 * GIB},
        {"recomputes": True},
    ],
    ids=["cheap collections", "empty_cache now and then", "evaluation", "short waits", "first evaluation compiles",
         "start-up pages", "memory is needed", "no checkpointing", "no device"],
)  # fmt: skip
def test_what_only_looks_slow_is_not_named(changes: dict[str, Any]) -> None:
    assert causes(**changes) == []
