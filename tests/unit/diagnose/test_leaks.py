"""The leak verdict must find leaks and must stay silent on everything that only looks like one."""

import numpy as np
import pytest

from workbench.diagnose import judge_leak, leak_finding
from workbench.units import GIB, MIB

REST = 2 * GIB


def noise(num_steps: int, size: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0, size, num_steps)


def saw_tooth(num_steps: int) -> np.ndarray:
    return (np.arange(num_steps) % 7) * 3.0 * MIB


@pytest.mark.parametrize(
    ("num_steps", "per_step"),
    [(40, 1 * MIB), (40, 10 * MIB), (120, 0.1 * MIB), (120, 1 * MIB), (1000, 0.1 * MIB), (1000, 10 * MIB)],
)
def test_a_steady_leak_is_found_with_its_rate(num_steps: int, per_step: float) -> None:
    series = REST + per_step * np.arange(num_steps)
    verdict = judge_leak(series, capacity_bytes=16 * GIB)
    assert verdict.verdict == "leak"
    assert verdict.bytes_per_step == pytest.approx(per_step, rel=0.05)
    assert verdict.steps_until_full == pytest.approx((16 * GIB - series[-1]) / per_step, rel=0.1)


def test_a_leak_under_a_saw_tooth_and_noise_is_found() -> None:
    series = REST + saw_tooth(150) + noise(150, 2 * MIB) + 1 * MIB * np.arange(150)
    assert judge_leak(series).verdict == "leak"


CONTROLS = {
    "flat": np.zeros(60),
    "noise": noise(60, 5 * MIB),
    "optimizer state appears in step 1": np.r_[0, np.full(59, 500 * MIB)],
    "exponential warm-up": 300 * MIB * (1 - np.exp(-np.arange(80) / 6)),
    "saw-tooth": saw_tooth(90),
    "one longer batch": np.r_[np.zeros(40), np.full(40, 64 * MIB)],
    "bounded buffer that fills": np.minimum(np.arange(100), 30) * 2.0 * MIB,
    "falling": -2.0 * MIB * np.arange(60),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_what_only_looks_like_a_leak_is_not_called_one(name: str) -> None:
    verdict = judge_leak(REST + CONTROLS[name])
    assert verdict.verdict in ("clean", "warm_up", "bounded_buffer", "periodic"), verdict.text
    assert leak_finding(verdict) is None


def test_too_few_steps_say_so() -> None:
    verdict = judge_leak(REST + 50 * MIB * np.arange(10))
    assert verdict.verdict == "too_early"
    assert "10 of the" in verdict.reason


def test_missing_values_are_left_out() -> None:
    series = np.r_[REST + 4.0 * MIB * np.arange(60)]
    series[::3] = np.nan
    assert judge_leak(series).verdict == "leak"


def test_the_text_says_what_was_watched() -> None:
    assert "Watched: allocated bytes at rest after each of 60 steps" in judge_leak(np.full(60, REST)).text


KINDS = {
    "bounded_buffer": {"rest_bytes": REST + np.minimum(np.arange(100), 30) * 2.0 * MIB},
    "warm_up": {"rest_bytes": REST + 300 * MIB * (1 - np.exp(-np.arange(80) / 6))},
    "periodic": {"rest_bytes": REST + saw_tooth(90)},
    "longer_batch": {
        "rest_bytes": REST + 4096.0 * np.sort(noise(80, 5000)),
        "num_tokens": np.sort(noise(80, 5000)),
    },
    "fragmentation": {
        "rest_bytes": np.full(80, float(REST)),
        "peak_bytes": REST + noise(80, 512 * MIB),
        "reserved_bytes": REST + np.minimum(0.2 * np.arange(80), 14) * GIB,
    },
    "clean": {"rest_bytes": REST + noise(60, 0.2 * MIB)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_verdict_is_given_with_its_reason(kind: str) -> None:
    verdict = judge_leak(**KINDS[kind])
    assert verdict.verdict == kind, verdict.text
    assert leak_finding(verdict) is None


def test_a_period_is_named_in_steps() -> None:
    assert "every 7 steps" in judge_leak(REST + saw_tooth(90)).reason


def test_a_leak_beside_batches_that_grow_is_still_a_leak() -> None:
    tokens = 1000 + 200 * np.sin(np.arange(120))
    verdict = judge_leak(REST + 4096 * tokens + 2 * MIB * np.arange(120), num_tokens=tokens)
    assert verdict.verdict == "leak"


def test_reserved_memory_that_a_longer_batch_needed_is_no_fragmentation() -> None:
    peaks = np.r_[np.full(60, REST), np.full(40, 2.0 * REST)]
    verdict = judge_leak(np.full(100, REST / 2), peak_bytes=peaks, reserved_bytes=1.1 * peaks)
    assert verdict.verdict == "clean"
