"""Micro-batches that do not fit are cut: the same gradients, and back to larger ones where there is room."""

from __future__ import annotations

import pytest
import torch

from workbench.recipe import Recipe, find_problems
from workbench.train.micro_batches import MicroBatches, cut


def parts_of(policy: str, capacity_bytes: int = 10**9) -> MicroBatches:
    return MicroBatches(Recipe().with_changes({"policies.on_oom": policy}), capacity_bytes)


def batch(rows: int, length: int = 6) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(rows * length).view(rows, length)}


class Device:
    """Computes sums of rows, and is full above ``limit`` slots."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total, self.drawn, self.sizes = limit, 0.0, [], []

    def compute(self, part: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = part["input_ids"]
        self.sizes.append(ids.shape[0])
        self.drawn.append(float(torch.rand(())))
        self.total += float(ids[:1].sum())  # A failing backward has added some gradients already.
        if ids.numel() > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.total += float(ids[1:].sum())
        return ids.sum().float()

    def drop(self) -> None:
        self.total = 0.0


def test_a_step_that_did_not_fit_is_repeated_from_its_begin() -> None:
    device, parts = Device(limit=12), parts_of("halve_micro_batch")
    first, second = batch(2), batch(8)
    torch.manual_seed(0)
    parts.begin_step(8, 48)
    assert float(parts.run(first, device.compute, device.drop)) == float(first["input_ids"].sum())
    assert float(parts.run(second, device.compute, device.drop)) == float(second["input_ids"].sum())
    assert parts.parts == 4
    assert device.sizes == [2, 8, 1, 1, 4, 1, 1, 2, 2, 2, 2]
    assert device.total == float(first["input_ids"].sum() + second["input_ids"].sum())
    assert device.drawn[2] == device.drawn[0], "the random state is that of the begin of the step"


@pytest.mark.parametrize(("policy", "rows"), [("stop", 8), ("halve_micro_batch", 1)])
def test_what_cannot_be_cut_is_raised(policy: str, rows: int) -> None:
    device, parts = Device(limit=3), parts_of(policy)
    parts.begin_step(rows, 6 * rows)
    with pytest.raises(torch.OutOfMemoryError):
        parts.run(batch(rows), device.compute, device.drop)


def test_other_errors_are_no_reason_to_cut() -> None:
    def fail(part: object) -> torch.Tensor:
        raise ValueError("no memory of it")

    parts = parts_of("halve_micro_batch")
    parts.begin_step(4, 24)
    with pytest.raises(ValueError, match="no memory of it"):
        parts.run(batch(4), fail, lambda: None)
    assert parts.parts == 1


@pytest.mark.parametrize(("policy", "grown"), [("halve_micro_batch", None), ("adapt_micro_batch", 1)])
def test_short_batches_go_whole_again_where_there_is_room(policy: str, grown: int | None) -> None:
    device, parts = Device(limit=30), parts_of(policy, capacity_bytes=1000)
    parts.begin_step(8, 48)
    parts.run(batch(8), device.compute, device.drop)
    parts.end_step({"allocated_bytes": 100, "peak_allocated_bytes": 100 + 24 * 20})
    assert parts.parts == 2
    assert parts.begin_step(8, 48) is None, "48 slots failed before"
    again = parts_of(policy, capacity_bytes=1000)
    again.restore(parts.state())
    assert again.begin_step(8, 32) == grown  # 32 x 20 + 100 of 1,000 bytes
    assert parts_of(policy, capacity_bytes=700).parts == 1
    tight = parts_of(policy, capacity_bytes=800)
    tight.restore(parts.state())
    assert tight.begin_step(8, 32) is None  # 740 of 800 bytes leave no room to spare


def test_parts_lose_the_padding_that_none_of_their_rows_needs() -> None:
    whole = {
        "input_ids": torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 7], [0, 0, 8, 9]]),
        "labels": torch.tensor([0, 1, 2, 3]),
        "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]]),
    }
    first, second = cut(whole, 2)
    assert first["input_ids"].tolist() == [[1, 2], [3, 0]] and first["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert first["labels"].tolist() == [0, 1]
    assert second["input_ids"].shape == (2, 4)
    assert "attention_mask" not in cut(whole, 4)[1] and cut(whole, 4)[3]["input_ids"].tolist() == [[8, 9]]
    assert len(cut(whole, 16)) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"sharding.num_processes": 2},
        {"model.task": "image-text-to-text"},
        {"training.torch_compile": True, "training.torch_compile_mode": "reduce-overhead"},
    ],
)
def test_what_cannot_be_repeated_is_refused(changes: dict[str, object]) -> None:
    recipe = Recipe().with_changes({**changes, "policies.on_oom": "halve_micro_batch"})
    assert any(problem.field == "policies.on_oom" for problem in find_problems(recipe))
