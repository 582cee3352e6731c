"""Faults that the raw loss gives away."""

import numpy as np

from workbench.diagnose import find_loss_faults

STEPS = np.arange(1, 9)
GOOD = np.array([2.0, 1.9, 1.8, 1.85, 1.7, 1.6, 1.65, 1.5])
NORMS = np.full(8, 0.7)


def causes(loss: np.ndarray, norms: np.ndarray = NORMS) -> list[str]:
    return [finding.cause for finding in find_loss_faults(STEPS, loss, norms)]


def test_a_healthy_run_has_no_finding() -> None:
    assert causes(GOOD) == []


def test_the_first_step_that_is_not_finite_is_named() -> None:
    loss = GOOD.copy()
    loss[4:] = np.nan
    (finding,) = find_loss_faults(STEPS, loss, NORMS)
    assert finding.cause == "nonfinite.loss"
    assert finding.where == {"step": 5}


def test_a_gradient_that_is_not_finite_is_found_while_the_loss_is_good() -> None:
    norms = NORMS.copy()
    norms[2] = np.inf
    assert causes(GOOD, norms) == ["nonfinite.gradient"]


def test_a_loss_of_exactly_zero_is_an_alarm() -> None:
    assert causes(np.array([2.0, 1.9, 0.0, 0.0, 1.7, 1.6, 1.5, 1.4])) == ["loss.exactly_zero"]


def test_a_frozen_loss_is_an_alarm() -> None:
    assert causes(np.array([2.0, 1.9, 1.8, 1.7, 1.7, 1.7, 1.7, 1.7])) == ["loss.frozen"]
