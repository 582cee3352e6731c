"""Rules across the fields that say what trains: bottleneck adapters, new tokens, pruning, several tasks."""

from __future__ import annotations

from ..errors import Problem
from .recipe import Recipe


def trained_problems(recipe: Recipe) -> list[Problem]:
    """Return what contradicts itself in the settings of what trains."""
    return _bottleneck(recipe)


def _bottleneck(recipe: Recipe) -> list[Problem]:
    adapter, problems = recipe.adapter, []
    if adapter.method != "bottleneck":
        if adapter.bottleneck_size != Recipe().adapter.bottleneck_size:
            message = f"is the size of bottleneck adapters, and adapter.method is {adapter.method}."
            problems.append(Problem("adapter.bottleneck_size", message, (("adapter.method", "bottleneck"),)))
        return problems
    for name, plain in (("use_dora", False), ("use_rslora", False), ("lora_dropout", 0.0)):
        if getattr(adapter, name) != plain:
            field = f"adapter.{name}"
            problems.append(Problem(field, "belongs to LoRA, not to bottleneck adapters.", ((field, plain),)))
    if adapter.target_modules != "all-linear":
        message = "names modules for LoRA; bottlenecks stand behind attention and feed-forward (layers_to_transform)."
        problems.append(Problem("adapter.target_modules", message, (("adapter.target_modules", "all-linear"),)))
    if recipe.model.task == "seq2seq-lm":
        message = "bottleneck adapters are for models with one stack of layers; an encoder-decoder has two."
        problems.append(Problem("adapter.method", message, (("adapter.method", "lora"),)))
    return problems
