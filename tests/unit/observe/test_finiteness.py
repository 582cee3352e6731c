"""The first operator that makes NaN or Inf, forward and backward, and what stays silent."""

import torch
from torch import nn

from workbench.observe.finiteness import FinitenessMode


def test_the_operator_the_line_and_a_zero_argument_are_found() -> None:
    with FinitenessMode() as mode:
        torch.log(torch.sigmoid(torch.tensor([-200.0])))
    (op,) = mode.created
    assert (op.op, op.value, op.has_zero_operand) == ("aten.log", "-inf", True)
    assert op.line.startswith(__file__)


def test_a_gradient_that_is_not_finite_where_the_forward_is() -> None:
    x = torch.zeros(3, requires_grad=True)
    with FinitenessMode() as mode:
        x.square().sum().sqrt().backward()
    assert mode.created[0].phase == "backward" and mode.created[0].node == "SqrtBackward0"


def test_overflow_of_half_precision_says_what_float32_gives_and_which_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).half()
    with torch.no_grad():
        model[0].weight.fill_(1e4)
    with FinitenessMode(model=model) as mode, torch.no_grad():
        model(torch.full((1, 4), 1e4).half())
    assert mode.created[0].module == "0"
    assert mode.created[0].fp32_largest == 4e8


def test_masks_of_minus_infinity_are_seen_and_harmless() -> None:
    with FinitenessMode() as mode:
        mask = torch.zeros(2, 2).masked_fill(torch.tensor([[False, True], [False, False]]), float("-inf"))
        torch.softmax(mask, -1)
    assert mode.created == [] and mode.first_nan is None and len(mode.masked) == 1


def test_a_fully_masked_row_is_counted() -> None:
    with FinitenessMode() as mode:
        torch.softmax(torch.full((2, 3), float("-inf")), -1)
    assert mode.first_nan is not None and mode.first_nan.all_masked_rows == 2
