"""Which parameters train: all, the last layers, chosen modules, and other ones in each phase of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import Problem, RecipeError
from ..recipe import Recipe
from .layers import decoder_layers

_WARMED_UP = "constant_with_warmup"


def freeze_weights(recipe: Recipe, model: nn.Module) -> None:
    """Freeze what ``adapter.trainable_layers`` and ``adapter.trainable_modules`` leave out of full fine-tuning.

    What lies outside the repeated layers (embeddings, final norm, output head) trains only where it is named.

    Raises:
        RecipeError: There are not so many layers, or a name matches no module, or nothing is left to train.
    """
    adapter = recipe.adapter
    if adapter.trainable_layers is None and not adapter.trainable_modules:
        return
    layer_of = parameter_layers(model)
    first = _first_trainable_layer(adapter.trainable_layers, model, "adapter.trainable_layers")
    named = _named_parameters(adapter.trainable_modules, model)
    for parameter in model.parameters():
        layer = layer_of.get(parameter)
        in_layers = layer is not None and layer >= first
        if adapter.trainable_modules:
            # A module outside the layers has no layer that could leave it out.
            parameter.requires_grad = parameter in named and (layer is None or in_layers)
        else:
            parameter.requires_grad = in_layers
    if not any(parameter.requires_grad for parameter in model.parameters()):
        names = ", ".join(adapter.trainable_modules)
        raise RecipeError(
            [
                Problem(
                    "adapter.trainable_modules",
                    f"{names} have no parameter in the last {adapter.trainable_layers} layers: nothing would train.",
                    (("adapter.trainable_layers", None),),
                )
            ]
        )


def adapted_layers(recipe: Recipe, model: nn.Module) -> list[int]:
    """Return the indices of the last layers, which alone get an adapter; empty where all do."""
    count = recipe.adapter.trainable_layers
    if count is None:
        return []
    first = _first_trainable_layer(count, model, "adapter.trainable_layers")
    return list(range(first, len(decoder_layers(model))))


def parameter_layers(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the layer of each parameter that lies in one of the repeated layers."""
    return {parameter: index for index, layer in enumerate(decoder_layers(model)) for parameter in layer.parameters()}


def _first_trainable_layer(count: int | None, model: nn.Module, field: str) -> int:
    if not count:
        return 0
    num_layers = len(decoder_layers(model))
    if count > num_layers:
        raise RecipeError([Problem(field, f"{count} is more than the model's {num_layers} layers.", ((field, None),))])
    return num_layers - count


def _named_parameters(names: tuple[str, ...], model: nn.Module) -> set[nn.Parameter]:
    found: set[nn.Parameter] = set()
    for wanted in names:
        pattern = re.compile(rf"(?:.*\.)?{re.escape(wanted)}")
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        if not modules:
            parts = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules() if name}
            known = ", ".join(sorted(part for part in parts if not part.isdigit()))
            raise RecipeError(
                [
                    Problem(
                        "adapter.trainable_modules",
                        f"{wanted} is no module of this model. Modules are: {known}.",
                        (("adapter.trainable_modules", ()),),
                    )
                ]
            )
        found.update(parameter for module in modules for parameter in module.parameters())
    return found


# -- phases ------------------------------------------------------------------------------------------------------------


def phase_at(recipe: Recipe, step: int) -> int:
    """Return the index of the phase that optimizer step ``step`` (0 for the first) belongs to; 0 without phases."""
    for index, length in enumerate(recipe.phases.steps):
        step -= length
        if step < 0:
            return index
    return max(0, len(recipe.phases.steps) - 1)


class PhaseSwitch:
    """Turns parameters on and off at the borders of phases.

    Args:
        recipe: The settings; ``phases.steps`` may be empty.
        model: As built: what requires a gradient now is what may train in any phase.

    Raises:
        RecipeError: A phase names more layers than there are.
    """

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        self._recipe = recipe
        self._current: int | None = None
        self._layers: list[tuple[nn.Parameter, int | None]] = []
        self._firsts: list[int] = []
        counts = recipe.phases.trainable_layers
        if not counts:
            return
        base: Any = model
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        self._firsts = [_first_trainable_layer(count, base, "phases.trainable_layers") for count in counts]
        layer_of = parameter_layers(base)
        self._layers = [(one, layer_of.get(one)) for one in model.parameters() if one.requires_grad]

    def apply(self, step: int, optimizer: torch.optim.Optimizer | None = None) -> int | None:
        """Set what trains in the phase of ``step``.

        The optimizer's state of a parameter that trains again later is kept; that of one that has trained for the last
        time is dropped, so that its memory is free.

        Args:
            step: Optimizer steps done.
            optimizer: Over all parameters that train in any phase.

        Returns:
            The index of the phase where a new one begins, else None.
        """
        index = phase_at(self._recipe, step)
        if index == self._current or not self._recipe.phases.steps:
            return None
        self._current = index
        for parameter, layer in self._layers:
            parameter.requires_grad = self._trains(layer, index)
            if not parameter.requires_grad:
                parameter.grad = None
                trains_again = any(self._trains(layer, later) for later in range(index + 1, len(self._firsts)))
                if optimizer is not None and not trains_again:
                    optimizer.state.pop(parameter, None)
        return index

    def _trains(self, layer: int | None, index: int) -> bool:
        # What lies outside the layers (a head that trains whole) trains in every phase.
        return layer is None or layer >= self._firsts[index]


def phase_schedule(recipe: Recipe, optimizer: torch.optim.Optimizer) -> Any:
    """Return a schedule that begins anew in each phase, from the phase's own learning rate."""
    training, phases = recipe.training, recipe.phases
    rates = phases.learning_rate or (training.learning_rate,) * len(phases.steps)
    starts = [sum(phases.steps[:index]) for index in range(len(phases.steps))]

    def factor(step: int) -> float:
        index = phase_at(recipe, step)
        share = _shape(training.lr_scheduler_type)(step - starts[index], training.warmup_steps, phases.steps[index])
        return rates[index] / training.learning_rate * share

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _shape(name: str) -> Callable[[int, int, int], float]:
    """Return transformers' schedule of this name as a function of step, warm-up steps and steps in all."""

    def shape(step: int, warmup: int, total: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        if name == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress)) if name == "cosine" else 1.0

    return shape


def phase_recipes(recipe: Recipe) -> list[tuple[Recipe, int]]:
    """Return each phase as a Recipe of one phase, with its number of optimizer steps."""
    phases = recipe.phases
    found = []
    for index, steps in enumerate(phases.steps):
        changes: dict[str, Any] = {"phases.steps": (steps,)}
        for name in ("learning_rate", "trainable_layers"):
            values = getattr(phases, name)
            changes[f"phases.{name}"] = values[index : index + 1]
        found.append((recipe.with_changes(changes), steps))
    return found
