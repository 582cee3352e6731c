from __future__ import annotations

import torch

from workbench.estimate.work import describe_work

ATEN = torch.ops.aten


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_a_product_counts_its_operations_and_all_it_touches() -> None:
    left, right = _meta(6, 5), _meta(5, 4)
    assert describe_work(ATEN.mm.default, (left, right), _meta(6, 4)) == (
        "aten.mm", (6, 5, 4), "bfloat16", 2 * 6 * 5 * 4, 2 * (30 + 20 + 24), "nn",
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


def test_a_product_knows_which_side_lies_transposed() -> None:
    left, right = _meta(5, 6).t(), _meta(4, 5).t()
    facts = describe_work(ATEN.mm.default, (left, right), _meta(6, 4))
    assert facts is not None
    assert facts[5] == "tt"
    plain = describe_work(ATEN.mm.default, (_meta(6, 5), right), _meta(6, 4))
    assert plain is not None
    assert plain[5] == "nt"


def test_attention_of_the_cpu_counts_half_of_the_square_when_causal() -> None:
    query, key = _meta(2, 3, 8, 4), _meta(2, 3, 10, 4)
    attend = ATEN._scaled_dot_product_flash_attention_for_cpu.default
    whole, half = (describe_work(attend, (query, key, key, 0.0, causal), query) for causal in (False, True))
    assert whole is not None and half is not None
    assert whole[1] == (8, 10, 4)
    assert whole[3] == 2 * half[3] == 2 * 2 * 3 * 8 * 10 * (4 + 4)


def test_a_plain_operator_says_whether_it_reads_with_strides() -> None:
    value = _meta(6, 5)
    for argument, access in ((value, ""), (value.t(), "strided")):
        facts = describe_work(ATEN.clone.default, (argument,), value)
        assert facts is not None
        assert facts[2:] == ("bfloat16", 0, 2 * 2 * 30, access)
