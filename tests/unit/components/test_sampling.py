"""How often samples are drawn: groups equally, whatever their size."""

import numpy as np
import pytest

from workbench.components.sampling import inverse_frequencies, length_buckets, sample_probabilities
from workbench.recipe import Recipe


def test_lengths_fall_into_powers_of_two() -> None:
    assert length_buckets([1, 2, 3, 4, 7, 8, 1023, 1024, 2**20]).tolist() == [0, 1, 1, 2, 2, 3, 9, 10, 20]


def test_every_group_has_the_same_chance() -> None:
    groups = np.array([5] * 90 + [2] * 9 + [7])
    chances = inverse_frequencies(groups)
    assert chances.sum() == pytest.approx(1)
    assert [chances[groups == group].sum() for group in (2, 5, 7)] == pytest.approx([1 / 3] * 3)


def test_the_recipe_chooses_what_is_balanced() -> None:
    columns = {"length": [4, 5, 6, 40], "labels": [[0], [1], [1], [1]]}

    def chances(sampling: str) -> list[float] | None:
        found = sample_probabilities(Recipe().with_changes({"data.sampling": sampling}), columns)
        return None if found is None else found.tolist()

    assert chances("uniform") is None
    assert chances("balanced_length") == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert chances("balanced_class") == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])
