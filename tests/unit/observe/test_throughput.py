"""Speed, padding and time left, from a history."""

from __future__ import annotations

import pytest

from workbench.observe.history import History
from workbench.observe.throughput import measure_throughput


def _history(rows):
    history = History()
    for row in rows:
        history.append(row)
    return history


def test_an_empty_history_knows_nothing():
    speed = measure_throughput(History(), 10)
    assert (speed.step_s, speed.tokens_per_s, speed.padding_fraction, speed.remaining_s) == (None, None, None, None)


def test_rates_padding_and_time_left():
    rows = [
        {
            "step": step,
            "step_s": 0.5,
            "elapsed_s": step * 0.5,
            "num_tokens": 60,
            "num_padding_tokens": 20,
            "num_supervised_tokens": 30,
        }
        for step in range(1, 11)
    ]
    speed = measure_throughput(_history(rows), 30)
    assert speed.step_s == 0.5
    assert speed.tokens_per_s == pytest.approx(120)
    assert speed.padding_fraction == pytest.approx(0.25)
    assert speed.supervised_fraction == pytest.approx(0.5)
    assert (speed.num_tokens, speed.elapsed_s) == (600, 5.0)
    assert speed.remaining_s == pytest.approx(10.0)
    assert measure_throughput(_history(rows)).remaining_s is None


def test_time_left_counts_what_happens_between_steps():
    rows = [{"step": step, "step_s": 0.5, "elapsed_s": step * 2.0, "num_tokens": 1} for step in range(1, 11)]
    assert measure_throughput(_history(rows), 20).remaining_s == pytest.approx(20.0)


def test_the_present_speed_is_that_of_recent_steps():
    rows = [
        {"step": step, "step_s": 1.0 if step <= 100 else 0.1, "elapsed_s": float(step), "num_tokens": 10}
        for step in range(1, 201)
    ]
    speed = measure_throughput(_history(rows))
    assert speed.step_s == pytest.approx(0.1)
    assert speed.tokens_per_s == pytest.approx(100)
