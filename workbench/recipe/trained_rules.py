"""Rules across the fields that say what trains: bottleneck adapters, new tokens, pruning, several tasks."""

from __future__ import annotations

import re
from typing import Any

from ..errors import Problem
from .recipe import Recipe

_TASK = re.compile(r"(?!(?:shared|default)=)[a-zA-Z][a-zA-Z0-9_-]*=.+")


def trained_problems(recipe: Recipe) -> list[Problem]:
    """Return what contradicts itself in the settings of what trains."""
    return [*_bottleneck(recipe), *_start(recipe), *_new_tokens(recipe), *_pruning(recipe), *_tasks(recipe)]


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


def _start(recipe: Recipe) -> list[Problem]:
    adapter = recipe.adapter
    problems: list[Problem] = []
    if adapter.name_or_path is None:
        return problems
    if adapter.method == "none":
        message = "names an adapter to start from, and adapter.method is none."
        problems.append(Problem("adapter.name_or_path", message, (("adapter.name_or_path", None),)))
    elif adapter.trainable_layers is not None:
        message = "the adapter that the run starts from says itself which layers it has."
        problems.append(Problem("adapter.trainable_layers", message, (("adapter.trainable_layers", None),)))
    return problems


def _new_tokens(recipe: Recipe) -> list[Problem]:
    model, adapter, field = recipe.model, recipe.adapter, "model.new_tokens"
    if not model.new_tokens:
        return []
    wanted = tuple(dict.fromkeys(token for token in model.new_tokens if token.strip()))
    if wanted != model.new_tokens:
        return [Problem(field, "a token is named twice or is empty.", ((field, wanted),))]
    if model.task not in ("causal-lm", "sequence-classification"):
        return [Problem(field, f"tokens cannot be added for model.task={model.task}.", ((field, ()),))]
    if adapter.method == "bottleneck":
        message = "the rows of new tokens train beside LoRA, or with all weights; bottleneck adapters leave them out."
        return [Problem(field, message, (("adapter.method", "lora"),))]
    if adapter.method == "none" and (adapter.trainable_layers is not None or adapter.trainable_modules):
        message = "their rows would not train where only chosen layers or modules do."
        return [Problem(field, message, (("adapter.trainable_layers", None), ("adapter.trainable_modules", ())))]
    if recipe.sharding.num_processes > 1 and recipe.sharding.layout != "ddp":
        message = f"{recipe.sharding.layout} cuts the embeddings whose rows they are; ddp gives each device all."
        return [Problem(field, message, (("sharding.layout", "ddp"),))]
    return []


def _pruning(recipe: Recipe) -> list[Problem]:
    pruning, training, plain = recipe.pruning, recipe.training, Recipe().pruning
    problems: list[Problem] = []
    off = (("pruning.method", "none"),)
    if pruning.method == "none":
        for name in ("amount", "step"):
            if getattr(pruning, name) != getattr(plain, name):
                message = "says how much or when is pruned, and pruning.method is none."
                problems.append(Problem(f"pruning.{name}", message, (("pruning.method", "l1_global"),)))
                break
        return problems
    if recipe.quantization.bits:
        message = f"weights in {recipe.quantization.bits} bits cannot be set to zero one by one."
        fix = ((f"quantization.load_in_{recipe.quantization.bits}bit", False),)
        problems.append(Problem("pruning.method", message, fix))
    if recipe.model.task == "seq2seq-lm":
        message = "pruning is for models with one stack of layers; an encoder-decoder has two."
        problems.append(Problem("pruning.method", message, off))
    if recipe.sharding.num_processes > 1 and recipe.sharding.layout != "ddp":
        message = f"{recipe.sharding.layout} cuts the weights that are compared; ddp gives each device all."
        problems.append(Problem("pruning.method", message, (("sharding.layout", "ddp"),)))
    if recipe.phases.trainable_layers and pruning.step != 0:
        message = "layers that rest in one phase and train in a later one hold their zeros only when pruned at first."
        problems.append(Problem("pruning.step", message, (("pruning.step", 0),)))
        return problems
    num_steps = sum(recipe.phases.steps) or max(0, training.max_steps)
    if pruning.step is not None and num_steps and pruning.step >= num_steps:
        message = f"{pruning.step} is not before the last of {num_steps} steps; empty prunes after it."
        problems.append(Problem("pruning.step", message, (("pruning.step", None),)))
    elif pruning.step != 0 and recipe.evaluation.load_best_model_at_end:
        message = "the best checkpoint may be one from before pruning; prune before the first step, or keep the last."
        problems.append(Problem("pruning.step", message, (("pruning.step", 0),)))
    return problems


def _tasks(recipe: Recipe) -> list[Problem]:
    tasks, field = recipe.tasks, "tasks.data"
    if not tasks.data:
        if tasks.shared_layers is None:
            return []
        message = "says how many layers several tasks share, and tasks.data names none."
        return [Problem("tasks.shared_layers", message, (("tasks.shared_layers", None),))]
    names = [entry.split("=", 1)[0] for entry in tasks.data]
    wrong = [entry for entry in tasks.data if not _TASK.fullmatch(entry)]
    if wrong or len(set(names)) != len(names) or len(names) < 2:
        seen = wrong[0] if wrong else ", ".join(tasks.data)
        message = f"{seen!r} is not allowed; allowed are two or more name=data set with names that differ (letters, "
        return [Problem(field, message + "digits, _ and -; not shared or default).", ((field, ()),))]
    problems = []
    for path, wanted in _TASKS_NEED.items():
        value = recipe.get(path)
        if value not in wanted:
            message = f"{value!r} does not go with several tasks, whose rows each get their own adapter."
            problems.append(Problem(path, message, ((path, wanted[0]),)))
    return problems


# What several tasks go with; the first value is the one to take.
_TASKS_NEED: dict[str, tuple[Any, ...]] = {
    "adapter.method": ("lora",),
    "model.task": ("causal-lm",),
    "adapter.use_dora": (False,),
    "adapter.modules_to_save": ((),),
    "adapter.layers_to_transform": ((),),
    "adapter.trainable_layers": (None,),
    "adapter.name_or_path": (None,),
    "model.new_tokens": ((),),
    "data.packing": (False,),
    "training.loss_type": ("nll",),
    "training.torch_compile": (False,),
    "phases.trainable_layers": ((),),
    "sharding.num_processes": (1,),
}
