"""Gradient checkpointing. The only file that knows what the installed transformers calls it."""

from __future__ import annotations

from torch import nn

from ..errors import ModelError


def enable_checkpointing(model: nn.Module) -> None:
    """Keep only each layer's input and compute the rest again in backward (non-reentrant).

    transformers 5.24 renamed ``gradient_checkpointing_enable`` to ``activation_checkpointing_enable`` and warns about
    the old name. Both also make the embedding's output require a gradient, which only the reentrant variant needs: it
    would send the backward pass through every frozen layer below the first adapter, so it is undone.

    Raises:
        ModelError: The model does not support checkpointing.
    """
    arguments = {"use_reentrant": False}
    try:
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)  # type: ignore[operator]
    except (AttributeError, ValueError) as error:
        raise ModelError(
            f"{type(model).__name__} does not support gradient checkpointing ({error}). "
            "Set training.gradient_checkpointing=False."
        ) from error
    if hasattr(model, "disable_input_require_grads") and getattr(model, "_require_grads_hooks", True):
        model.disable_input_require_grads()  # type: ignore[operator]
