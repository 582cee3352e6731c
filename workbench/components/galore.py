"""AdamW whose moments live in the space of the largest singular directions of each weight's gradient (GaLore).

All state is tensors: a checkpoint restores it exactly, and a trace sees its bytes. The published package keeps its
projections as Python objects inside the state, which a checkpoint that runs no code when it is read cannot hold.

Source:
    Zhao et al., GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection, arXiv:2403.03507; the order of
    operations is that of ``galore_torch`` 1.0, ``adamw.py`` and ``galore_projector.py`` (``proj_type="std"``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..recipe import Recipe


class GaLoreAdamW(torch.optim.Optimizer):
    """AdamW; groups with a ``rank`` keep moments of ``rank`` rows or columns instead of whole weights.

    Args:
        params: Groups; of one with ``rank``, ``update_proj_gap`` and ``scale`` every weight is a matrix.
        lr: Learning rate; low-rank updates are scaled by ``scale`` beside it.
        betas: Decay of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # no loss comes back
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, parameter.grad)

    def _update(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        state = self.state[parameter]
        count = state.get("step", 0)
        is_low = "rank" in group and min(parameter.shape) > group["rank"]
        if is_low:
            if count % group["update_proj_gap"] == 0:
                state["projection"] = find_projection(grad, group["rank"])
            grad = project(grad, state["projection"])
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
        state["step"] = count = count + 1
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = mean / square.sqrt().add_(group["eps"])
        if is_low:
            update = project_back(update, state["projection"]).mul_(group["scale"])
        size = group["lr"] * math.sqrt(1 - beta2**count) / (1 - beta1**count)
        parameter.add_(update, alpha=-size)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])


def find_projection(grad: Tensor, rank: int) -> Tensor:
    """Return the ``rank`` largest singular directions of a gradient (m, n), on its shorter side.

    Shape (rank, n) where m >= n, else (m, rank); orthonormal, a tensor of its own.
    """
    left, _, right = torch.linalg.svd(grad.float(), full_matrices=False)
    directions = right[:rank] if grad.shape[0] >= grad.shape[1] else left[:, :rank]
    return directions.to(grad.dtype, memory_format=torch.contiguous_format, copy=True)


def project(grad: Tensor, projection: Tensor) -> Tensor:
    """Return a gradient (m, n) in the low-rank space: (m, rank) where m >= n, else (rank, n)."""
    return grad @ projection.t() if grad.shape[0] >= grad.shape[1] else projection.t() @ grad


def project_back(update: Tensor, projection: Tensor) -> Tensor:
    """Return an update of the low-rank space in the shape of its weight."""
    is_tall = update.shape[1] == projection.shape[0]
    return update @ projection if is_tall else projection @ update


def galore_groups(recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    """Return the trainable parameters in up to three groups: projected matrices, others that decay, vectors.

    Projected are the weights of linear layers. Embeddings and the output head are not: the rows of rare tokens have
    gradients in few steps, and one space for all tokens would lose them.
    """
    training = recipe.training
    heads = {id(module.weight) for module in _embeddings(model)}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)} - heads
    low = [parameter for parameter in trainable if id(parameter) in linear]
    whole = [parameter for parameter in trainable if parameter.ndim >= 2 and id(parameter) not in linear]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    rank: dict[str, Any] = {
        "rank": training.galore_rank,
        "update_proj_gap": training.galore_update_proj_gap,
        "scale": training.galore_scale,
    }
    groups: list[dict[str, Any]] = [
        {"params": low, "weight_decay": training.weight_decay, **rank},
        {"params": whole, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _embeddings(model: Any) -> list[Any]:
    """Return the modules that hold a row for each token."""
    getters = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
    found = [getter() for getter in getters if getter is not None]
    return [module for module in found if isinstance(getattr(module, "weight", None), Tensor)]
