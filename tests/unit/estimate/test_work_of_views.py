"""What operators compute and move: views are free, products with packed weights are products."""

import pytest
import torch

from workbench.estimate.work import describe_work


def test_a_view_that_its_schema_hides_moves_nothing() -> None:
    value = torch.empty(8, 4, device="meta")
    view = torch.ops.aten._unsafe_view.default
    assert describe_work(view, (value, [32]), view(value, [32])) is None


def test_a_product_with_a_packed_weight_counts_as_many_operations_as_a_plain_one() -> None:
    pytest.importorskip("bitsandbytes")
    product = torch.ops.bitsandbytes.gemm_4bit.default
    rows, inner, columns = 6, 64, 32
    packed = torch.empty(inner * columns // 2, 1, dtype=torch.uint8, device="meta")
    scales = torch.empty(inner * columns // 64, device="meta")
    left = torch.empty(2, 3, inner, dtype=torch.float16, device="meta")
    result = torch.empty(2, 3, columns, dtype=torch.float16, device="meta")
    work = describe_work(product, (left, packed, [columns, inner], scales, 64, "nf4"), result)
    assert work is not None
    assert 2 * rows * inner * columns in work
