"""Results whose shape or value is data: how many tokens an expert gets, which elements are true.

A trace has no values, so it takes what is expected: a boolean mask of the batch selects all it can, a row of a one-hot
routing table selects its share of the tokens, and sizes that are read back from the device divide evenly. Models that
route tokens (mixtures of experts) are traced at a perfect balance; a real router is never better than that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FIND_TRUE = torch.ops.aten.nonzero.default
_INDEX = torch.ops.aten.index.Tensor
_GROUPED = torch.ops.aten._grouped_mm.default
_UNIQUE = torch.ops.aten.unique_consecutive.default
_REPEAT = torch.ops.aten.repeat_interleave.Tensor
# The operators that ``result_of`` knows.
OPERATORS = frozenset({_FIND_TRUE, _INDEX, _GROUPED, _REPEAT, _UNIQUE})


class ExpectedSizes(list[int]):
    """Sizes that a model read from the device to split by; there are no values, so the split is even."""

    def shares_of(self, total: int) -> list[int]:
        """Return sizes that add up to ``total`` and differ by at most 1."""
        count = len(self)
        return [total // count + (index < total % count) for index in range(count)]


def result_of(func: Any, args: Any, kwargs: Any, num_true: int | None) -> Any:
    """Return the meta result of an operator whose shape is data, or None where torch's own rule does.

    Args:
        func: The operator.
        args, kwargs: Its arguments.
        num_true: Elements that a search for true ones finds at most; None finds all.
    """
    if func is _FIND_TRUE and args[0].is_meta:
        return torch.empty((_expected_true(args[0], num_true), args[0].ndim), dtype=torch.int64, device="meta")
    if func is _INDEX and args[0].is_meta:
        return _index(args[0], args[1])
    if func is _GROUPED and args[0].is_meta and args[0].dtype != torch.bfloat16:
        return _grouped_product(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
    if func is _UNIQUE and args[0].is_meta:
        # Asked by models that demand the same number of end tokens in every row: one value.
        none = torch.empty((0,), dtype=torch.int64, device="meta")
        return torch.empty((1,), dtype=args[0].dtype, device="meta"), none, torch.empty_like(none)
    if func is _REPEAT and args[0].is_meta:
        size = kwargs.get("output_size")
        return torch.empty((args[0].shape[0] if size is None else size,), dtype=torch.int64, device="meta")
    return None


def _expected_true(mask: Tensor, num_true: int | None) -> int:
    """Return how many elements are true.

    A view of an int64 tensor is one row of a one-hot table: of ``E`` rows over the same places, one is true at each.
    """
    count = mask.numel()
    if mask.dtype == torch.int64 and mask.is_meta and count:
        rows = mask.untyped_storage().nbytes() // (mask.itemsize * count)
        if rows > 1:
            return max(1, count // rows)
    return count if num_true is None else min(count, num_true)


def _index(source: Tensor, indices: Any) -> Tensor | None:
    """Index by boolean masks: each is taken as true everywhere, which is the most it can select."""
    masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return None
    places: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            places.append(index)
        else:
            found = torch.empty((index.numel(),), dtype=torch.int64, device="meta")
            places += [found] * index.ndim
    result: Tensor = _INDEX(source, places)
    return result


def _grouped_product(left: Tensor, right: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the product of groups in other dtypes than bfloat16, which torch's rule for meta tensors refuses.

    Source:
        ``_grouped_mm_fallback``, aten/src/ATen/native/GroupedMMUtils.h: one product a group, written into one result.
    """
    if left.ndim == 2 and right.ndim == 2:
        groups = 1 if offsets is None else offsets.shape[0]
        shape: tuple[int, ...] = (groups, left.shape[0], right.shape[1])
    elif left.ndim == 2:
        shape = (left.shape[0], right.shape[-1])
    elif right.ndim == 2:
        shape = (left.shape[1], right.shape[1])
    else:
        shape = (left.shape[0], left.shape[1], right.shape[-1])
    return torch.empty(shape, dtype=left.dtype, device="meta")
