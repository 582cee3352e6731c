from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from workbench.estimate import Estimate, estimate_run, explain_run
from workbench.estimate.explain import find_hills
from workbench.hardware import find_device
from workbench.recipe import Recipe

T4 = find_device("Tesla T4")
TINY = Recipe().with_changes({"model.name_or_path": "tiny-llama", "data.max_length": 128})


@pytest.fixture(scope="module")
def explained() -> Estimate:
    return explain_run(TINY, T4)


def test_the_figures_are_those_of_the_estimate(explained: Estimate) -> None:
    plain = estimate_run(TINY, T4)
    why = explained.explanation
    assert why is not None
    assert why.peak.allocated_bytes == plain.memory.peak_allocated_bytes == explained.memory.peak_allocated_bytes
    assert why.peak.phase == plain.memory.peak_phase
    assert why.peak.step == plain.memory.peak_step
    by_category = {share.name: share.num_bytes for share in why.by_category}
    assert by_category["parameter"] == plain.memory.breakdown["parameter"]
    assert by_category["activation"] == plain.memory.breakdown["activation"]


def test_categories_modules_and_operators_add_up_to_the_same_bytes(explained: Estimate) -> None:
    why = explained.explanation
    assert why is not None
    picture = why.picture
    assert picture is not None
    alive = sum(size for _, _, size in picture.holders_at(picture.peak))
    assert alive == sum(share.num_bytes for share in why.by_category if share.name != "workspace")
    attention = sum(size for _, module, size in picture.holders_at(picture.peak) if module.endswith("self_attn"))
    assert attention == next(share.num_bytes for share in why.by_module if share.name.endswith("self_attn"))
    weights = next(share.num_bytes for share in why.by_operator if share.name == "weights")
    assert weights == next(share.num_bytes for share in why.by_category if share.name == "parameter")


def test_the_picture_marks_the_highest_instant_and_the_bands_add_up(explained: Estimate) -> None:
    picture = explained.explanation.picture  # type: ignore[union-attr]  # it was asked for
    assert picture is not None
    totals = np.sum([picture.bytes_by_category[name] for name in picture.bytes_by_category], axis=0)
    assert int(totals.argmax()) == picture.peak
    assert picture.window[0] <= picture.peak <= picture.window[1]
    for category in ("parameter", "activation", "gradient"):
        held = [size for kind, _, size in picture.holders_at(picture.peak, category)]
        assert sum(held) == picture.bytes_by_category[category][picture.peak]
    assert all(int(value) >= 0 for value in picture.holders.min(axis=0))


def test_the_next_highest_is_lower_and_elsewhere(explained: Estimate) -> None:
    why = explained.explanation
    assert why is not None
    assert why.next_highest is not None
    assert why.next_highest.allocated_bytes < why.peak.allocated_bytes
    place, other = ((i.phase, i.module, i.operator) for i in (why.peak, why.next_highest))
    assert place != other


def test_reasons_add_up_to_what_is_reserved_and_not_allocated(explained: Estimate) -> None:
    why, memory = explained.explanation, explained.memory
    assert why is not None
    reasons = sum(gap.num_bytes for gap in why.gaps if gap.kind != "rounding")
    assert reasons == memory.peak_reserved_bytes - memory.peak_allocated_bytes


def test_slopes_foretell_other_batches(explained: Estimate) -> None:
    why = explained.explanation
    assert why is not None
    assert why.bytes_per_sample is not None
    assert why.bytes_per_token is not None
    assert explained.memory.bytes_per_token == why.bytes_per_token
    batch = TINY.training.per_device_train_batch_size
    more = estimate_run(TINY.with_changes({"training.per_device_train_batch_size": batch + 4}), T4)
    foretold = explained.memory.peak_allocated_bytes + 4 * why.bytes_per_sample
    assert more.memory.peak_allocated_bytes == pytest.approx(foretold, rel=0.1)
    longer = estimate_run(TINY.with_changes({"data.max_length": 144}), T4)
    foretold = explained.memory.peak_allocated_bytes + 16 * batch * why.bytes_per_token
    assert longer.memory.peak_allocated_bytes == pytest.approx(foretold, rel=0.1)


def test_json_has_the_explanation_without_its_arrays(explained: Estimate) -> None:
    values = json.loads(json.dumps(explained.to_dict()))
    assert values["explanation"]["peak"]["allocated_bytes"] == explained.memory.peak_allocated_bytes
    assert values["explanation"]["picture"] is None
    assert "explanation" not in dataclasses.replace(explained, explanation=None).to_dict()


def test_a_cpu_has_no_reasons_of_an_allocator() -> None:
    from workbench.hardware import read_device

    why = explain_run(TINY, read_device("cpu")).explanation
    assert why is not None
    assert why.gaps == []
    assert why.picture is not None
    assert len(why.picture.reserved_bytes) == 0


@pytest.mark.parametrize(
    ("values", "dip", "tops"),
    [
        ([0, 5, 3, 9, 0], 3, [3]),  # the dip of 2 parts nothing
        ([0, 5, 1, 9, 0], 3, [1, 3]),
        ([0, 1, 2, 3], 1, [3]),
        ([3, 2, 1, 0], 1, [0]),
        ([0, 5, 5, 1, 4, 0, 7], 3, [2, 4, 6]),
    ],
)
def test_hills(values: list[int], dip: int, tops: list[int]) -> None:
    assert find_hills(np.array(values, dtype=np.int64), dip) == tops
