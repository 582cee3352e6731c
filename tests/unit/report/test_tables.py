"""Text for terminals: what an estimate and a plan say."""

import dataclasses

import pytest

from workbench.estimate.estimate import BatchShape, Estimate, MemoryEstimate, TimeEstimate
from workbench.events import Timeline
from workbench.report.tables import render_estimate, render_table
from workbench.units import GIB, MIB


@pytest.fixture
def estimate() -> Estimate:
    memory = MemoryEstimate(
        peak_allocated_bytes=9 * GIB,
        peak_reserved_bytes=10 * GIB,
        process_bytes=10 * GIB + 300 * MIB,
        capacity_bytes=15 * GIB,
        interval_bytes=(10 * GIB, 11 * GIB),
        verdict="fits",
        breakdown={"parameter": 8 * GIB, "activation": GIB, "cached": GIB, "context": 300 * MIB},
        peak_phase="backward",
        peak_step=1,
        rest_bytes=8 * GIB,
        host_bytes=0,
        peak_by_phase={"backward": 9 * GIB},
        holders=(),
        timeline=Timeline({}, ()),
    )
    step_time = TimeEstimate(
        step_s=0.5,
        tokens_per_s=2048,
        samples_per_s=4,
        seconds_by_class={"matmul": 0.5},
        flops=1e12,
        basis="table",
        interval_s=(0.4, 0.7),
        total_s=50,
        num_steps=100,
        cost_usd=(0.004, 0.25),
    )
    shape = BatchShape(2, 512, 512, 512, padded=False, source="max_length")
    return Estimate("digest", "Tesla T4", 8_000_000_000, 40_000_000, shape, memory, step_time, notes=["A note."])


def test_an_estimate_says_verdict_range_peak_and_speed(estimate: Estimate) -> None:
    text = render_estimate(estimate)
    assert text.startswith(
        "Fits on Tesla T4: 10.3 GiB of 15 GiB (between 10 GiB and 11 GiB), peak in backward of step 2."
    )
    assert "40M train (0.50%)" in text
    assert "Step: 500 ms (between 400 ms and 700 ms, table), 2,048 tokens/s." in text
    assert "Run: 100 steps, 50 s." in text
    assert "Cost: 0.0040 to 0.25 USD for the run." in text
    assert text.endswith("Note: A note.")


def test_an_estimate_shown_by_a_cell_is_two_lines(estimate: Estimate) -> None:
    from IPython.lib.pretty import pretty

    assert (
        pretty(estimate)
        == str(estimate)
        == render_estimate(estimate).splitlines()[0]
        + "\n"
        + ("Step: 500 ms (between 400 ms and 700 ms, table), 2,048 tokens/s.")
    )


def test_the_largest_category_comes_first_and_bars_are_in_proportion(estimate: Estimate) -> None:
    lines = [line for line in render_estimate(estimate).splitlines() if "█" in line]
    assert [line.split()[0] for line in lines] == ["parameter", "activation", "cached", "context"]
    assert lines[0].count("█") == 21  # 8 of 15 GiB on 40 characters


def test_a_run_that_does_not_fit_says_so(estimate: Estimate) -> None:
    memory = dataclasses.replace(estimate.memory, verdict="does_not_fit")
    assert render_estimate(dataclasses.replace(estimate, memory=memory)).startswith("Does not fit on Tesla T4")


def test_columns_of_numbers_stand_to_the_right() -> None:
    assert render_table(("name", "steps"), [("a", 5), ("long", 120)]).splitlines() == [
        "name  steps",
        "----  -----",
        "a         5",
        "long    120",
    ]
