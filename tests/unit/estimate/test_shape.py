from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from workbench.components.packing import pack_lengths
from workbench.estimate.shape import full_shape, reshaped, shape_of_lengths
from workbench.recipe import Recipe


def _recipe(**changes: object) -> Recipe:
    fields = {"batch": "training.per_device_train_batch_size", "max_length": "data.max_length"}
    return Recipe().with_changes({fields.get(name, f"data.{name}"): value for name, value in changes.items()})


def test_without_data_every_sample_is_full() -> None:
    shape = full_shape(_recipe(batch=3, max_length=100))
    assert (shape.batch_size, shape.length, shape.mean_length, shape.padded) == (3, 100, 100.0, False)
    assert shape.source == "max_length"


def test_mean_length_is_the_expected_longest_of_a_random_batch() -> None:
    lengths = np.array([10, 20, 30, 40])
    shape = shape_of_lengths(_recipe(batch=2), lengths)
    pairs = [max(a, b) for a in lengths for b in lengths]
    assert shape.mean_length == pytest.approx(np.mean(pairs))
    assert (shape.length, shape.mean_real_tokens, shape.padded) == (40, 25.0, True)


def test_one_sample_or_equal_samples_need_no_mask() -> None:
    assert not shape_of_lengths(_recipe(batch=1), np.array([10, 40])).padded
    assert not shape_of_lengths(_recipe(batch=4), np.array([16] * 8)).padded


def test_grouping_by_length_pads_less() -> None:
    lengths = np.arange(1, 101)
    assert (
        shape_of_lengths(_recipe(batch=4, group_by_length=True), lengths).mean_length
        < shape_of_lengths(_recipe(batch=4), lengths).mean_length
    )


def test_balance_by_length_draws_long_samples_more_often() -> None:
    lengths = np.array([10, 12, 14, 40])
    shape = shape_of_lengths(_recipe(batch=2, sampling="balanced_length"), lengths)
    chances = np.array([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    longest_of_two = np.outer(chances, chances) * np.maximum.outer(lengths, lengths)
    assert shape.mean_length == pytest.approx(longest_of_two.sum())
    assert shape.mean_real_tokens == pytest.approx(26)


def test_padding_to_max_length() -> None:
    shape = shape_of_lengths(_recipe(batch=2, max_length=64, padding="max_length"), np.array([10, 64]))
    assert (shape.length, shape.mean_length, shape.padded) == (64, 64.0, True)


@pytest.mark.parametrize(
    "changes",
    [{"padding": "longest"}, {"packing": True}, {"max_length": 50}, {"group_by_length": True, "padding": "longest"}],
    ids=str,
)
def test_with_the_rows_lengths_reshaped_is_the_shape_of_the_changed_data(changes: dict[str, object]) -> None:
    raw = np.array([20, 130, 60, 31, 9])
    before = _recipe(batch=2, max_length=100, padding="max_length")
    after = before.with_changes({f"data.{name}": value for name, value in changes.items()})
    cut = np.minimum(raw, after.data.max_length)
    made = [cut[group].sum() for group in pack_lengths(cut, 100)] if after.data.packing else cut
    known = dataclasses.replace(shape_of_lengths(before, np.minimum(raw, 100)), raw_lengths=raw)
    assert reshaped(known, before, after) == shape_of_lengths(after, np.array(made))


def test_a_sample_of_the_rows_stands_for_all_of_them() -> None:
    before = _recipe(batch=2, max_length=100)
    known = dataclasses.replace(
        shape_of_lengths(before, np.array([50] * 600)), raw_lengths=np.array([50] * 60)
    )  # as of ten times as many rows
    packed = reshaped(known, before, before.with_changes({"data.packing": True}))
    assert packed.num_samples == 300
    assert reshaped(packed, before.with_changes({"data.packing": True}), before).num_samples == 600


def test_reshaped_follows_a_change_without_the_data() -> None:
    before = _recipe(batch=2, max_length=100)
    shape = shape_of_lengths(before, np.array([20, 100, 60]))
    shorter = reshaped(shape, before, before.with_changes({"data.max_length": 50}))
    assert shorter.length == 50
    assert shorter.mean_length <= 50
    packed = reshaped(shape, before, before.with_changes({"data.packing": True}))
    assert (packed.length, packed.mean_real_tokens, packed.padded) == (100, 100.0, False)
    single = reshaped(shape, before, before.with_changes({"training.per_device_train_batch_size": 1}))
    assert (single.batch_size, single.padded) == (1, False)
