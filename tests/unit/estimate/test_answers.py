"""Results by rule are torch's own, strides and dtypes included; what a rule does not cover goes to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.estimate.answers import known_result

ATEN = torch.ops.aten
HALF, SINGLE = torch.float16, torch.float32


def _meta(*shape: int, dtype: torch.dtype = SINGLE) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _heads(*, dtype: torch.dtype = SINGLE) -> Tensor:
    """Queries as attention sees them: (batch, heads, tokens, size) over memory in the order of the tokens."""
    return _meta(2, 6, 4, 8, dtype=dtype).transpose(1, 2)


CALLS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "mul": lambda: (ATEN.mul.Tensor, (_meta(2, 6, 8), _meta(8, dtype=HALF))),
    "mul of half and float": lambda: (ATEN.mul.Tensor, (_meta(2, 8, dtype=HALF), _meta(2, 1))),
    "mul by a scalar tensor": lambda: (ATEN.mul.Tensor, (_meta(2, 8, dtype=HALF), _meta())),
    "mul of heads": lambda: (ATEN.mul.Tensor, (_heads(), _meta(2, 1, 6, 8))),
    "mul of heads by a scalar tensor": lambda: (ATEN.mul.Tensor, (_heads(dtype=HALF), _meta())),
    "add to heads": lambda: (ATEN.add.Tensor, (_heads(), _heads())),
    "add of other orders": lambda: (ATEN.add.Tensor, (_heads(), _meta(2, 4, 6, 8))),
    "add of a number": lambda: (ATEN.add.Scalar, (_meta(2, 8, dtype=HALF), 1e-6)),
    "neg of half the features": lambda: (ATEN.neg.default, (_heads()[..., 4:],)),
    "neg of a transposed matrix": lambda: (ATEN.neg.default, (_meta(3, 5).t(),)),
    "silu": lambda: (ATEN.silu.default, (_meta(2, 3, 8, dtype=HALF),)),
    "mm": lambda: (ATEN.mm.default, (_meta(6, 5), _meta(4, 5).t())),
    "bmm": lambda: (ATEN.bmm.default, (_meta(2, 6, 5), _meta(2, 4, 5).transpose(1, 2))),
    "softmax": lambda: (ATEN._softmax.default, (_meta(2, 4, dtype=HALF), -1, False)),
    "log_softmax": lambda: (ATEN._log_softmax.default, (_meta(6, 9), 1, False)),
    "safe softmax": lambda: (ATEN._safe_softmax.default, (_meta(2, 4, 6, 6), -1)),
    "softmax backward": lambda: (ATEN._softmax_backward_data.default, (_meta(2, 4), _meta(2, 4), -1, HALF)),
    "log_softmax backward": lambda: (ATEN._log_softmax_backward_data.default, (_meta(2, 4), _meta(2, 4), -1, SINGLE)),
    "cat of features": lambda: (ATEN.cat.default, ([_heads()[..., 4:], _heads()[..., :4]], -1)),
    "cat of rows": lambda: (ATEN.cat.default, ([_meta(2, 4), _meta(3, 4)],)),
    "cat in channels-last order": lambda: (
        ATEN.cat.default, ([_meta(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)] * 2,),
    ),
    "cumsum": lambda: (ATEN.cumsum.default, (_meta(2, 6, dtype=torch.int64), -1)),
    "cumsum of bool": lambda: (ATEN.cumsum.default, (_meta(2, 6, dtype=torch.bool), -1)),
    "tril of bool": lambda: (ATEN.tril.default, (_meta(6, 6, dtype=torch.bool),)),
    "mean": lambda: (ATEN.mean.dim, (_meta(2, 6, 8), [-1], True)),
    "sum of two": lambda: (ATEN.sum.dim_IntList, (_meta(2, 6, 8), [0, 1])),
    "slice backward": lambda: (ATEN.slice_backward.default, (_meta(2, 3), [2, 6], 1, 0, 3, 1)),
    "ne": lambda: (ATEN.ne.Scalar, (_meta(2, 6, dtype=torch.int64), -100)),
    "le of two": lambda: (ATEN.le.Tensor, (_meta(6, dtype=torch.int64), _meta(6, 1, dtype=torch.int64))),
    "nll_loss": lambda: (
        ATEN.nll_loss_forward.default, (_meta(6, 9), _meta(6, dtype=torch.int64), None, 1, -100),
    ),
    "nll_loss of each": lambda: (
        ATEN.nll_loss_forward.default, (_meta(6, 9), _meta(6, dtype=torch.int64), None, 0, -100),
    ),
    "nll_loss backward": lambda: (
        ATEN.nll_loss_backward.default, (_meta(), _meta(6, 9), _meta(6, dtype=torch.int64), None, 2, -100, _meta()),
    ),
}  # fmt: skip
# Cases that no rule covers: their answer has to be None.
LEFT_TO_TORCH = {"cumsum of bool", "cat in channels-last order"}


def _described(result: Any) -> Any:
    if isinstance(result, Tensor):
        return tuple(result.shape), result.stride(), result.dtype
    return [_described(item) for item in result]


@pytest.mark.parametrize("name", CALLS)
def test_a_rule_gives_what_torch_gives(name: str) -> None:
    func, args = CALLS[name]()
    known = known_result(func, args, {})
    if name in LEFT_TO_TORCH:
        assert known is None
    else:
        assert known == _described(func(*args))


def test_arguments_by_name_and_real_tensors_are_left_to_torch() -> None:
    assert known_result(ATEN.add.Tensor, (_meta(2), _meta(2)), {"alpha": 2}) is None
    assert known_result(ATEN.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {}) is None
    assert known_result(ATEN.add.Tensor, (torch.ones(2), torch.ones(2)), {}) is None
