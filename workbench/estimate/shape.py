"""BatchShape: the longest and the mean batch of a data set, or the fullest one there can be."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from ..components.sampling import inverse_frequencies, length_buckets
from ..recipe import Recipe
from .estimate import BatchShape

if TYPE_CHECKING:
    from ..components.data import PreparedData


def full_shape(recipe: Recipe) -> BatchShape:
    """Return the shape where every sample fills ``max_length``."""
    length = recipe.data.max_length
    return BatchShape(
        batch_size=recipe.training.per_device_train_batch_size,
        length=length,
        mean_length=float(length),
        mean_real_tokens=float(length),
        padded=False,
        source="max_length",
    )


def shape_of_data(recipe: Recipe, prepared: PreparedData) -> BatchShape:
    """Return the shape of the batches that the chosen data set makes.

    Args:
        recipe: Batch size, padding, packing and grouping.
        prepared: From ``prepare_data``.
    """
    return shape_of_lengths(recipe, np.asarray(prepared.lengths))


def shape_of_lengths(recipe: Recipe, lengths: np.ndarray) -> BatchShape:
    """Return the shape for samples of these lengths.

    The mean length of a batch is the expected maximum of its samples, for samples drawn at random: of ``n`` sorted
    lengths the ``i``-th is the longest of a batch of ``b`` with probability ``(i/n)**b - ((i-1)/n)**b``. Where samples
    are balanced by length, their shares take the place of ``1/n``; of balance by class only the data could tell.
    """
    data, batch_size = recipe.data, recipe.training.per_device_train_batch_size
    if len(lengths) == 0:
        return full_shape(recipe)
    batch_size = min(batch_size, len(lengths))
    ordered = np.sort(lengths.astype(np.float64))
    mean_real = float(ordered.mean())
    ranks = np.arange(len(ordered) + 1) / len(ordered)
    longest = int(ordered[-1])
    varied = bool(ordered[0] != ordered[-1])
    if data.sampling == "balanced_length" and varied:
        shares = inverse_frequencies(length_buckets(ordered))
        mean_real = float((ordered * shares).sum())
        ranks = np.concatenate(([0.0], np.cumsum(shares)))
    if data.packing:
        return BatchShape(batch_size, longest, mean_real, mean_real, False, "data", len(lengths))
    if data.padding == "max_length":
        padded = bool(ordered[0] < data.max_length)
        return BatchShape(
            batch_size, data.max_length, float(data.max_length), mean_real, padded, "data", len(lengths)
        )  # fmt: skip
    if data.group_by_length:
        mean_length = float(
            np.mean([chunk[-1] for chunk in np.array_split(ordered, max(1, len(ordered) // batch_size))])
        )
    else:
        mean_length = float((ordered * np.diff(ranks**batch_size)).sum())
    padded = varied and batch_size > 1
    return BatchShape(batch_size, longest, mean_length, mean_real, padded, "data", len(lengths))


def reshaped(shape: BatchShape, before: Recipe, after: Recipe) -> BatchShape:
    """Return the shape after a change of batch size, length, padding or packing, without reading the data again.

    Args:
        shape: Batches of ``before``.
        before: The settings it was made for.
        after: The changed settings.

    Returns:
        The shape; where only the data could tell, the fuller of the possibilities.
    """
    if shape.source == "max_length":
        return full_shape(after)
    values = dataclasses.asdict(shape)
    values["batch_size"] = after.training.per_device_train_batch_size
    cut = after.data.max_length / before.data.max_length
    if cut != 1:
        fills = shape.length >= before.data.max_length
        values["length"] = after.data.max_length if fills else min(shape.length, after.data.max_length)
        for name in ("mean_length", "mean_real_tokens"):
            values[name] = min(values[name], float(values["length"]))
    if after.data.packing:
        values |= {"length": after.data.max_length, "padded": False}
        values["mean_length"] = values["mean_real_tokens"] = float(after.data.max_length)
    elif before.data.packing or after.data.padding == "max_length":
        values |= {"length": after.data.max_length, "mean_length": float(after.data.max_length)}
    if not after.data.packing:
        varied = shape.mean_real_tokens < shape.length
        values["padded"] = varied and (values["batch_size"] > 1 or after.data.padding == "max_length")
    return BatchShape(**values)
