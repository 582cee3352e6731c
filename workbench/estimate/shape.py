"""BatchShape: the longest and the mean batch of a data set, or the fullest one there can be."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from ..components.packing import pack_lengths
from ..components.sampling import inverse_frequencies, length_buckets
from ..recipe import Recipe
from .estimate import BatchShape

# Rows whose lengths are kept; more would only slow packing down.
MAX_LENGTHS = 20_000

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
    raw = np.asarray(prepared.raw_lengths)
    if len(raw) > MAX_LENGTHS:  # Evenly over the sorted rows, so that the shortest and the longest are among them.
        raw = np.sort(raw)[np.linspace(0, len(raw) - 1, MAX_LENGTHS).round().astype(np.int64)]
    return dataclasses.replace(shape_of_lengths(recipe, np.asarray(prepared.lengths)), raw_lengths=raw)


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
    fullest = int(ordered[-batch_size:].sum())
    if data.sampling == "balanced_length" and varied:
        shares = inverse_frequencies(length_buckets(ordered))
        mean_real = float((ordered * shares).sum())
        ranks = np.concatenate(([0.0], np.cumsum(shares)))
    if data.packing:
        return BatchShape(batch_size, longest, mean_real, mean_real, False, "data", len(lengths))
    if data.padding == "max_length":
        padded = bool(ordered[0] < data.max_length)
        return BatchShape(
            batch_size, data.max_length, float(data.max_length), mean_real, padded, "data", len(lengths), fullest
        )  # fmt: skip
    if data.group_by_length:
        mean_length = float(
            np.mean([chunk[-1] for chunk in np.array_split(ordered, max(1, len(ordered) // batch_size))])
        )
    else:
        mean_length = float((ordered * np.diff(ranks**batch_size)).sum())
    padded = varied and batch_size > 1
    return BatchShape(batch_size, longest, mean_length, mean_real, padded, "data", len(lengths), fullest)


def reshaped(shape: BatchShape, before: Recipe, after: Recipe) -> BatchShape:
    """Return the shape after a change of batch size, length, padding or packing, without reading the data again.

    Args:
        shape: Batches of ``before``.
        before: The settings it was made for.
        after: The changed settings.

    Returns:
        The shape that the rows make; where their lengths are not known, the fuller of the possibilities.
    """
    if shape.source == "max_length":
        return full_shape(after)
    if shape.raw_lengths is not None:
        return _from_rows(shape, before, after)
    values = {item.name: getattr(shape, item.name) for item in dataclasses.fields(shape)}
    values["batch_size"] = after.training.per_device_train_batch_size
    values["max_real_tokens"] = _fullest(shape, values["batch_size"])
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


def _from_rows(shape: BatchShape, before: Recipe, after: Recipe) -> BatchShape:
    """Return the shape that the rows make with the changed settings."""

    def lengths_of(recipe: Recipe) -> np.ndarray:
        cut = np.minimum(shape.raw_lengths, recipe.data.max_length)
        if not recipe.data.packing:
            return cut
        return np.array([cut[group].sum() for group in pack_lengths(cut, recipe.data.max_length)])

    if not {path.split(".")[0] for path in before.diff(after)} & {"data", "training"}:
        return shape
    changed = lengths_of(after)
    found = shape_of_lengths(after, changed)
    if found.num_samples is not None and shape.num_samples is not None:
        # Rows of which only a sample is known stand for all of them.
        known = len(changed) if before.data.packing == after.data.packing else len(lengths_of(before))
        found = dataclasses.replace(found, num_samples=round(shape.num_samples * found.num_samples / known))
    return dataclasses.replace(found, raw_lengths=shape.raw_lengths)


def _fullest(shape: BatchShape, batch_size: int) -> int | None:
    """Return how many real tokens a batch of another size can hold at most: the further samples are no longer."""
    known = shape.max_real_tokens
    if known is None:
        return None
    return min(
        -(-known * batch_size // shape.batch_size) if batch_size > shape.batch_size else known,
        batch_size * shape.length,
    )
