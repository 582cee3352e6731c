"""Optimizers and schedules, on real or fake parameters."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from ..errors import MissingPackageError, ModelError
from ..recipe import Recipe
from .freezing import phase_schedule
from .galore import GaLoreAdamW, galore_groups

BITSANDBYTES_OPTIMIZERS = ("adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit")


def build_optimizer(recipe: Recipe, model: nn.Module, *, for_cuda: bool | None = None) -> torch.optim.Optimizer:
    """Return the optimizer of the Recipe over the model's trainable parameters.

    Args:
        recipe: The settings.
        model: The model; its parameters may be fake.
        for_cuda: Whether to choose the code path torch takes on CUDA (``foreach`` for ``adamw_torch`` and ``sgd``,
            paging for ``paged_adamw_8bit``), for a trace of a GPU on the CPU. None goes by where the parameters are.

    Raises:
        ModelError: Nothing is trainable.
        MissingPackageError: bitsandbytes is needed and missing.
    """
    groups = parameter_groups(model, recipe.training.weight_decay)
    if not groups:
        raise ModelError("No parameter of this model is trainable. Set adapter.method=lora, or none for all weights.")
    training = recipe.training
    name, rate = training.optim, training.learning_rate
    if for_cuda is None:
        for_cuda = groups[0]["params"][0].is_cuda
    betas = (training.adam_beta1, training.adam_beta2)
    if name in ("adamw_torch", "adamw_torch_fused"):
        path: dict[str, Any] = {"fused": True} if name == "adamw_torch_fused" else {"foreach": for_cuda}
        return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=training.adam_epsilon, **path)
    if name == "galore_adamw":
        return GaLoreAdamW(galore_groups(recipe, model), lr=rate, betas=betas, eps=training.adam_epsilon)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=rate, foreach=for_cuda)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=rate, scale_parameter=False, relative_step=False, warmup_init=False)
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingPackageError("bitsandbytes", f"The optimizer {name}", "quantization")
    import bitsandbytes

    if name == "lion_8bit":
        return bitsandbytes.optim.Lion8bit(groups, lr=rate, betas=betas)
    # Paging moves states out of a GPU's memory; on a CPU bitsandbytes would warn and do without.
    is_paged = name == "paged_adamw_8bit" and for_cuda
    kind = bitsandbytes.optim.PagedAdamW8bit if is_paged else bitsandbytes.optim.AdamW8bit
    return kind(groups, lr=rate, betas=betas, eps=training.adam_epsilon)


def build_schedule(recipe: Recipe, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    """Return the learning-rate schedule over ``num_steps`` optimizer steps."""
    if recipe.phases.steps:
        return phase_schedule(recipe, optimizer)
    from transformers import get_scheduler

    name = recipe.training.lr_scheduler_type
    # transformers' "constant" ignores warm-up steps without a word; with 0 of them the two are the same.
    return get_scheduler(
        "constant_with_warmup" if name == "constant" else name,
        optimizer=optimizer,
        num_warmup_steps=recipe.training.warmup_steps,
        num_training_steps=num_steps,
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in up to two groups: with and without weight decay.

    Norm weights, biases and other vectors are left out of weight decay: pulling them to 0 does not regularise.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = ({"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]
