"""Do updates reach the weights? A few values are kept over six updates of a loop and compared; it happens once.

Three faults leave the loss finite and the log plausible: an optimizer built before the parameters it should train, a
rate so small that low-precision weights round back to what they were, and a rate of zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..diagnose.finding import Finding, Fix, make_finding

FIRST_UPDATE = 2  # The first update is often made at rate 0 by a warm-up.
NUM_UPDATES = 6
MAX_PARAMETERS = 32
SAMPLE = 16  # Values of each parameter: those with the largest gradients.
SEARCHED = 1_000_000


class UpdateCheck:
    """Keeps a sample of weights from one update to a later one."""

    def __init__(self, model: nn.Module | None, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.is_over = model is None or optimizer is None
        self._seen = 0
        self._kept: list[tuple[str, Tensor, Tensor, Tensor]] = []  # name, parameter, indices, values
        self._missing: list[tuple[str, Tensor, Tensor, Tensor]] = []
        self._rates: list[float] = []
        self._num_missing = 0

    def before_update(self) -> None:
        """Take the sample when its update comes; gradients are still there."""
        if self.is_over:
            return
        self._seen += 1
        if self._seen == FIRST_UPDATE:
            assert self.model is not None
            own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad and p.grad is not None]
            missing = [(name, p) for name, p in named if id(p) not in own]
            self._num_missing = len(missing)
            self._kept = list(_sample((n, p) for n, p in named if id(p) in own))
            self._missing = list(_sample(missing))
        if self._seen >= FIRST_UPDATE:
            self._rates += [float(group.get("lr", 0.0)) for group in self.optimizer.param_groups]

    def after_step(self) -> Finding | None:
        """Judge when enough updates have been seen; at most one finding."""
        if self.is_over or self._seen < FIRST_UPDATE + NUM_UPDATES:
            return None
        self.is_over = True
        finding = self._judge()
        self._kept, self._missing = [], []
        return finding

    def _judge(self) -> Finding | None:
        idle = [name for name, parameter, indices, values in self._missing if _same(parameter, indices, values)]
        if idle and len(idle) == len(self._missing):
            return make_finding(
                "model.optimizer_misses",
                f"{self._num_missing} trainable parameters get gradients but are not in the optimizer "
                f"({', '.join(idle[:3])}): {NUM_UPDATES} updates left them as they were.",
                where={"parameter": idle[0]},
                evidence={"num_missing": self._num_missing, "num_updates": NUM_UPDATES},
                confidence=0.95,
            )
        if not self._kept or not all(_same(parameter, indices, values) for _, parameter, indices, values in self._kept):
            return None
        name, parameter, _, _ = self._kept[0]
        highest = max(self._rates, default=0.0)
        dtype = str(parameter.dtype).removeprefix("torch.")
        if highest == 0.0:
            text, fix = "its learning rate was 0", Fix("See why the schedule gives 0.")
        else:
            text = f"at learning rate {highest:g} each step rounds back to the same {dtype} value"
            fix = Fix("Keep trained weights in float32 (mixed precision) or raise the learning rate.")
        return make_finding(
            "model.weights_not_moving",
            f"{NUM_UPDATES} updates changed none of the sampled weights: {text}.",
            where={"parameter": name},
            evidence={"num_updates": NUM_UPDATES, "learning_rate": highest, "dtype": dtype,
                      "num_parameters": len(self._kept)},
            fixes=[fix],
            confidence=0.9,
        )  # fmt: skip


def _sample(named: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield name, parameter, flat indices and their values, where the gradient is largest and not zero."""
    count = 0
    for name, parameter in named:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse or count >= MAX_PARAMETERS:
            continue
        size = gradient.reshape(-1)[:SEARCHED].abs()
        indices = size.topk(min(SAMPLE, size.numel())).indices
        indices = indices[size[indices] > 0]
        if indices.numel():
            count += 1
            yield name, parameter, indices, parameter.detach().reshape(-1)[indices].clone()


def _same(parameter: Tensor, indices: Tensor, values: Tensor) -> bool:
    return bool(torch.equal(parameter.detach().reshape(-1)[indices], values))
