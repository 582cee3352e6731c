"""How often each training sample is drawn: equally, or so that rare lengths or classes come as often as common ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..recipe import Recipe

Floats = npt.NDArray[np.float64]


def length_buckets(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return the bucket of each length, by powers of two: 1, 2-3, 4-7, 8-15 tokens and so on; shape (samples,).

    Powers of two keep the number of buckets small: with finer ones each long sample would be a group of its own and
    drawn as often as all short ones together.
    """
    # The exponent of a float is exact; a logarithm may round 2**k to just below k.
    return np.frexp(np.maximum(np.asarray(lengths, dtype=np.float64), 1.0))[1].astype(np.int64) - 1


def inverse_frequencies(groups: npt.ArrayLike) -> Floats:
    """Return the probability with which each sample is drawn so that every group is drawn equally often.

    Args:
        groups: Group of each sample, any whole numbers; shape (samples,).

    Returns:
        Probabilities that add up to 1; shape (samples,).
    """
    _, places, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    probabilities: Floats = 1.0 / (len(counts) * counts[places].astype(np.float64))
    return probabilities


def sample_probabilities(recipe: Recipe, columns: Mapping[str, Sequence[Any]]) -> Floats | None:
    """Return with which probability each training sample is drawn, or None where each comes once an epoch.

    Args:
        recipe: Its ``data.sampling`` decides.
        columns: Of the training set: ``length`` (tokens), and of a classifier ``labels`` (one class a row).
    """
    sampling = recipe.data.sampling
    if sampling == "uniform":
        return None
    if sampling == "balanced_length":
        return inverse_frequencies(length_buckets(np.asarray(columns["length"])))
    return inverse_frequencies([row[0] for row in columns["labels"]])
