"""Measured rates between the points where they were measured: linear interpolation of logarithms, constant outside."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

# Rows of ``(*coordinates, rate)``; the coordinates make a full grid.
Points = list[tuple[float, ...]]


class Curve:
    """A rate over one or more coordinates.

    Args:
        points: See ``Points``.

    Raises:
        ValueError: There are no points, or they do not make a full grid.

    Example:
        >>> Curve([(1.0, 10.0), (100.0, 1000.0)]).at(10.0)
        100.0
    """

    def __init__(self, points: Sequence[Sequence[float]]) -> None:
        if not points:
            raise ValueError("A curve needs at least one point.")
        count = len(points[0]) - 1
        self._axes = [sorted({math.log(point[axis]) for point in points}) for axis in range(count)]
        self._rates = {tuple(math.log(value) for value in point[:-1]): math.log(point[-1]) for point in points}
        if len(self._rates) != math.prod(len(axis) for axis in self._axes):
            raise ValueError(f"{len(points)} points do not make a full grid of {[len(axis) for axis in self._axes]}.")

    def at(self, *coordinates: float) -> float:
        """Return the rate at ``coordinates``; outside the grid that of its edge."""
        corners = [_between(axis, value) for axis, value in zip(self._axes, coordinates, strict=True)]
        total = 0.0
        for choice in itertools.product(*corners):
            weight = math.prod(share for _, share in choice)
            if weight:
                total += weight * self._rates[tuple(place for place, _ in choice)]
        return math.exp(total)


def _between(axis: list[float], value: float) -> list[tuple[float, float]]:
    """Return the neighbours of ``value`` on an axis with their weights."""
    place = math.log(value) if value > 0 else axis[0]
    if place <= axis[0]:
        return [(axis[0], 1.0)]
    if place >= axis[-1]:
        return [(axis[-1], 1.0)]
    upper = next(index for index, mark in enumerate(axis) if mark >= place)
    low, high = axis[upper - 1], axis[upper]
    share = (place - low) / (high - low)
    return [(low, 1 - share), (high, share)]
