"""The repeated layers of a model, and which of them a Recipe treats otherwise than the rest."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import ModelError
from ..recipe import Recipe


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of the (text) decoder in their order.

    Raises:
        ModelError: The model has no list of as many layers as its config says.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    count = getattr(text, "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and any(True for _ in module[0].children()):
            return list(module)
    raise ModelError(
        f"{type(model).__name__} has no list of {count} equal layers, so that settings for single layers "
        "(checkpointing of every n-th, activation storage, frozen layers) cannot be used. Leave them at their defaults."
    )


def has_layer_settings(recipe: Recipe) -> bool:
    """Whether single layers are treated otherwise than the rest, in a pattern that does not recur."""
    training = recipe.training
    checkpointing = training.gradient_checkpointing and training.gradient_checkpointing_keep_first > 0
    storage = training.activation_storage != "full" and bool(training.activation_storage_layers)
    frozen = recipe.adapter.trainable_layers is not None or any(recipe.phases.trainable_layers)
    return bool(recipe.adapter.layers_to_transform or recipe.tasks.data) or checkpointing or storage or frozen
