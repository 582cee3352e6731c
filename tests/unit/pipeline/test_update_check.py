"""Whether updates reach the weights: forgotten parameters, steps that round to nothing, a rate of zero."""

import pytest
import torch
from torch import nn

from workbench.diagnose.finding import Finding
from workbench.pipeline.update_check import FIRST_UPDATE, NUM_UPDATES, UpdateCheck


def judge(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = FIRST_UPDATE + NUM_UPDATES,
          beside: torch.optim.Optimizer | None = None) -> Finding | None:  # fmt: skip
    check = UpdateCheck(model, optimizer)
    for step in range(steps):
        torch.manual_seed(step)
        dtype = next(model.parameters()).dtype
        model(torch.randn(4, 6, dtype=dtype)).square().mean().backward()
        check.before_update()
        optimizer.step()
        if beside is not None:
            beside.step()
        model.zero_grad()
        finding = check.after_step()
        if finding is not None:
            return finding
    return None


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))


def test_a_healthy_loop_is_silent() -> None:
    model = two_layers()
    assert judge(model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps=20) is None


def test_parameters_outside_the_optimizer_are_named() -> None:
    model = two_layers()
    finding = judge(model, torch.optim.SGD(model[0].parameters(), lr=1e-2))
    assert finding is not None and finding.cause == "model.optimizer_misses"
    assert finding.where["parameter"] == "1.weight" and finding.evidence["num_missing"] == 2


def test_a_second_optimizer_that_trains_them_is_no_fault() -> None:
    model = two_layers()
    beside = torch.optim.SGD(model[1].parameters(), lr=1e-2)
    assert judge(model, torch.optim.SGD(model[0].parameters(), lr=1e-2), beside=beside) is None


@pytest.mark.parametrize(
    ("rate", "dtype", "word"), [(0.0, torch.float32, "rate was 0"), (1e-9, torch.bfloat16, "bfloat16")]
)
def test_weights_that_stay_as_they_were_are_named_with_the_reason(rate: float, dtype: torch.dtype, word: str) -> None:
    model = two_layers().to(dtype)
    finding = judge(model, torch.optim.SGD(model.parameters(), lr=rate))
    assert finding is not None and finding.cause == "model.weights_not_moving" and word in finding.summary


def test_nothing_is_judged_before_enough_updates() -> None:
    model = two_layers()
    assert judge(model, torch.optim.SGD(model.parameters(), lr=0.0), steps=FIRST_UPDATE + NUM_UPDATES - 1) is None
