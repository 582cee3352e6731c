"""Faults that only the course of a run shows."""

import pytest

from workbench.diagnose.course import find_course_faults, find_repeated_rows

STEADY = {
    "losses": [2.0 - 0.01 * step for step in range(12)],
    "grad_norms": [1.0] * 12,
    "clipped": [False] * 12,
    "rows": [(4, 1)] * 12,
    "num_updates": 12,
    "schedule_steps": 12,
}


def causes(**changes: object) -> list[str]:
    return [finding.cause for finding in find_course_faults(**{**STEADY, **changes})]  # type: ignore[arg-type]


def test_a_steady_run_has_none() -> None:
    assert causes() == []


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("loss.outlier_batch", {"grad_norms": [1.0] * 8 + [500.0] + [1.0] * 3}),
        ("training.effective_batch", {"rows": [(8, 1)] * 4 + [(4, 1)] * 8}),
        ("training.schedule", {"schedule_steps": 48}),
        ("loss.frozen", {"losses": [2.0] * 12}),
    ],
)
def test_each_fault_is_named(cause: str, changes: dict[str, object]) -> None:
    assert causes(**changes) == [cause]


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_norms": [1.0] * 8 + [500.0] + [1.0] * 3, "clipped": [True] * 12},
        {"rows": [(8, 1)] * 4 + [(4, 2)] * 8},
        {"rows": [(8, 1)] * 11 + [(4, 1)]},
        {"rows": [(8, 1), (4, 1)] * 6},
        {"schedule_steps": None},
        {"schedule_steps": 13},
        {"losses": [2.5] + [2.0] * 11},
        {"losses": [2.0] * 12, "num_updates": 0},
    ],
    ids=[
        "clipped",
        "accumulation doubled",
        "last batch of an epoch",
        "alternating",
        "no schedule",
        "one step more",
        "loss that settled",
        "evaluation of one batch",
    ],
)
def test_what_only_looks_like_a_fault_is_not_named(changes: dict[str, object]) -> None:
    assert causes(**changes) == []


def test_rows_that_come_again_after_resuming_are_counted() -> None:
    assert find_repeated_rows(range(20), range(20, 40)) is None
    finding = find_repeated_rows(range(20), range(10, 30))
    assert finding is not None and finding.evidence["num_repeated"] == 10


def test_a_frozen_loss_says_that_the_rate_was_zero() -> None:
    (finding,) = find_course_faults(**{**STEADY, "losses": [2.0] * 12, "learning_rates": [0.0] * 12})  # type: ignore[arg-type]
    assert finding.cause == "loss.frozen" and "rate was 0" in finding.summary
