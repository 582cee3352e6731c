from __future__ import annotations

import pytest

from workbench.hardware.curves import Curve


def test_a_rate_is_interpolated_between_points_and_constant_outside() -> None:
    curve = Curve([(1.0, 10.0), (100.0, 1000.0)])
    assert curve.at(10.0) == pytest.approx(100.0)
    assert curve.at(0.1) == pytest.approx(10.0)
    assert curve.at(1e6) == pytest.approx(1000.0)
    assert curve.at(0.0) == pytest.approx(10.0)


def test_a_grid_of_two_sides_is_met_at_its_points_and_mixed_between_them() -> None:
    curve = Curve([(1.0, 1.0, 2.0), (1.0, 4.0, 8.0), (4.0, 1.0, 32.0), (4.0, 4.0, 128.0)])
    assert curve.at(4.0, 1.0) == pytest.approx(32.0)
    assert curve.at(2.0, 2.0) == pytest.approx((2.0 * 8.0 * 32.0 * 128.0) ** 0.25)


@pytest.mark.parametrize("points", [[], [(1.0, 1.0, 2.0), (2.0, 3.0, 4.0)]])
def test_points_that_make_no_grid_are_refused(points: list[tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match=r"full grid|at least one"):
        Curve(points)
