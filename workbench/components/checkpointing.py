"""Gradient checkpointing. The only file that knows what the installed transformers calls it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import ModelError
from .layers import decoder_layers

# Who runs a checkpointed function: torch, or a trace that wants to know when it is computed again. A context variable
# belongs to one thread, so that a trace beside a training run does not touch it.
_RUNNER: contextvars.ContextVar[Callable[..., Any] | None] = contextvars.ContextVar("checkpoint_runner", default=None)


def run_checkpointed(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)``, keep nothing of its inside, and compute it again in backward."""
    runner = _RUNNER.get()
    if runner is not None:
        return runner(function, *args)
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, *args, use_reentrant=False)


@contextlib.contextmanager
def checkpoint_runner(runner: Callable[..., Any]) -> Iterator[None]:
    """Let ``runner(function, *args)`` stand in for torch's checkpoint in this thread."""
    token = _RUNNER.set(runner)
    try:
        yield
    finally:
        _RUNNER.reset(token)


def enable_checkpointing(model: Any, every: int = 1, keep_first: int = 0) -> None:
    """Keep only each layer's input and compute the rest again in backward (non-reentrant).

    Args:
        model: The base model.
        every: Checkpoint only layers 0, n, 2n, ... counted after the ones that are kept whole.
        keep_first: Layers at the bottom that are kept whole.

    transformers 5.24 renamed ``gradient_checkpointing_enable`` to ``activation_checkpointing_enable`` and warns about
    the old name. Both also make the embedding's output require a gradient, which only the reentrant variant needs: it
    would send the backward pass through every frozen layer below the first adapter, so it is undone.

    Raises:
        ModelError: The model does not support checkpointing, or has no list of layers to choose from.
    """
    arguments = {"use_reentrant": False}
    try:
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    except (AttributeError, ValueError) as error:
        raise ModelError(
            f"{type(model).__name__} does not support gradient checkpointing ({error}). "
            "Set training.gradient_checkpointing=False."
        ) from error
    if hasattr(model, "disable_input_require_grads") and getattr(model, "_require_grads_hooks", True):
        model.disable_input_require_grads()
    if every > 1 or keep_first:
        for index, layer in enumerate(decoder_layers(model)):
            if index < keep_first or (index - keep_first) % every:
                # The modules inside a layer are switched too where a model checkpoints those.
                parts: list[Any] = list(layer.modules())
                for module in parts:
                    if hasattr(module, "gradient_checkpointing"):
                        module.gradient_checkpointing = False
