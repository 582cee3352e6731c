from __future__ import annotations

import torch

from workbench.estimate.work import describe_work

ATEN = torch.ops.aten


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_a_product_counts_its_operations_and_all_it_touches() -> None:
    left, right = _meta(6, 5), _meta(5, 4)
    assert describe_work(ATEN.mm.default, (left, right), _meta(6, 4)) == (
        "aten.mm", (6, 5, 4), "bfloat16", 2 * 6 * 5 * 4, 2 * (30 + 20 + 24),
    )  # fmt: skip


def test_a_batched_product_multiplies_batches_into_rows() -> None:
    facts = describe_work(ATEN.bmm.default, (_meta(3, 6, 5), _meta(3, 5, 4)), _meta(3, 6, 4))
    assert facts is not None
    assert facts[1] == (18, 5, 4)
    assert facts[3] == 3 * 2 * 6 * 5 * 4


def test_a_bias_is_no_factor() -> None:
    facts = describe_work(ATEN.addmm.default, (_meta(4), _meta(6, 5), _meta(5, 4)), _meta(6, 4))
    assert facts is not None
    assert facts[3] == 2 * 6 * 5 * 4


def test_views_and_unwritten_memory_cost_nothing() -> None:
    value = _meta(6, 5)
    assert describe_work(ATEN.t.default, (value,), value.t()) is None
    assert describe_work(ATEN.empty_like.default, (value,), value) is None


def test_a_look_up_reads_only_its_rows() -> None:
    table, rows = _meta(1000, 8), torch.empty(3, dtype=torch.int64, device="meta")
    facts = describe_work(ATEN.embedding.default, (table, rows), _meta(3, 8))
    assert facts is not None
    assert facts[4] == 2 * 3 * 8 * 2
