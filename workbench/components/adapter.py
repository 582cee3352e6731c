"""What trains: LoRA through PEFT, bottlenecks, or the weights; with an error for every target that matches nothing."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import Problem, RecipeError
from ..recipe import Recipe
from .bottleneck import attach_bottlenecks
from .freezing import adapted_layers, freeze_weights
from .multitask import attach_tasks
from .new_tokens import trained_rows
from .starting import load_start, require_attached_to, starting_config, starting_recipe
from .task import CLASSIFICATION, head_modules, task_of

# Names of modules that hold the repeated layers; a number below them is a layer's index.
_LAYER_INDEX = re.compile(r"\.(\d+)\.")


def attach_adapter(
    recipe: Recipe, model: nn.Module, *, is_partial: bool = False, new_token_ids: Sequence[int] = ()
) -> nn.Module:
    """Return the model with what the Recipe trains made trainable: an adapter, or its weights.

    Args:
        recipe: The settings.
        model: The base model, quantized or not, on any device including ``meta``.
        is_partial: True for a copy with fewer layers than the real model: layer indices beyond it are left out then
            instead of being an error.
        new_token_ids: Rows of the embeddings that train beside LoRA.

    Raises:
        RecipeError: A target matches no module; the message names the ones that exist.
        ModelError: The adapter that the run starts from is of another base.
    """
    recipe = starting_recipe(recipe)
    adapter, is_meta = recipe.adapter, next(model.parameters()).device.type == "meta"
    if adapter.method == "none":
        freeze_weights(recipe, model)
        return model
    if adapter.name_or_path is not None and adapter.method == "lora":
        require_attached_to(model, recipe)
    require_targets(recipe, model, is_partial=is_partial)
    layers = [index for index in adapter.layers_to_transform if not is_partial or index < _num_layers(model)]
    layers = layers or adapted_layers(recipe, model)
    if adapter.method == "bottleneck":
        attach_bottlenecks(
            model,
            adapter.bottleneck_size,
            layers=layers,
            in_float32=adapter.autocast_adapter_dtype,
            train_whole=(*adapter.modules_to_save, *_heads(recipe, model)),
            base_model=recipe.model.name_or_path,
        )
        if adapter.name_or_path is not None and not is_meta:
            load_start(recipe, model)
        return model
    from peft import get_peft_model

    config = _lora_config(recipe, model, layers)
    if recipe.tasks.data:
        return attach_tasks(recipe, model, config)
    config.trainable_token_indices = trained_rows(model, new_token_ids)
    # On the meta device the adapter would be drawn with real numbers on the CPU and then thrown away.
    with torch.device("meta") if is_meta else contextlib.nullcontext(), warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5.24 a question by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        wrapped = get_peft_model(model, config, autocast_adapter_dtype=adapter.autocast_adapter_dtype)
    if is_meta and not adapter.autocast_adapter_dtype:
        _take_base_dtype(wrapped)
    if adapter.name_or_path is not None and not is_meta:
        load_start(recipe, wrapped)
    return wrapped


def _lora_config(recipe: Recipe, model: nn.Module, layers: list[int]) -> Any:
    """Return PEFT's config: of the adapter that the run starts from, or of the Recipe."""
    from peft import LoraConfig

    adapter = recipe.adapter
    if adapter.name_or_path is not None:
        config = starting_config(recipe)
        config.layers_to_transform = layers or None
        return config
    targets: str | list[str]
    targets = adapter.target_modules if isinstance(adapter.target_modules, str) else list(adapter.target_modules)
    if (layers or recipe.tasks.data) and isinstance(targets, str):
        # PEFT takes layer indices only beside a list of names.
        targets = sorted({name.rsplit(".", 1)[-1] for name in _matched_by_text(targets, model)})
    return LoraConfig(
        r=adapter.r,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=adapter.lora_dropout,
        target_modules=targets,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        modules_to_save=_modules_to_save(recipe, model) or None,
        layers_to_transform=layers or None,
        exclude_modules=_unfit_modules(recipe, model) if targets == "all-linear" else None,
        task_type=task_of(recipe).peft_type,
    )


# Of these models PEFT refuses to adapt the modules below: their fused kernels read the weights and skip the modules.
# Source: ``_check_lora_target_modules_mamba``, peft/tuners/tuners_utils.py (PEFT 0.21).
_MAMBA_TYPES = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"})
_MAMBA_MODULES = ("out_proj", "conv1d")


def _heads(recipe: Recipe, model: nn.Module) -> list[str]:
    """Return the modules of a new head: random as they are, they train whole beside the adapter."""
    return head_modules(model) if recipe.model.task == CLASSIFICATION else []


def _modules_to_save(recipe: Recipe, model: nn.Module) -> list[str]:
    """Return the modules that train whole beside the adapter; PEFT adds ``score`` and ``classifier`` by itself."""
    heads = [name for name in _heads(recipe, model) if name not in ("score", "classifier")]
    return list(dict.fromkeys((*recipe.adapter.modules_to_save, *heads)))


def _unfit_modules(recipe: Recipe, model: nn.Module) -> list[str] | None:
    """Return the Linear modules that ``all-linear`` leaves out, or None where it takes them all.

    A subclass of Linear with a forward of its own (the router of Llama 4 returns a pair) is not what an adapter wraps,
    and a head that trains whole needs no adapter.
    """
    heads = _heads(recipe, model)
    config: Any = getattr(model, "config", None)
    is_mamba = getattr(config, "model_type", None) in _MAMBA_TYPES
    names = []
    for name, module in model.named_modules():
        # bitsandbytes' own forward and torch's are plain products.
        defined_in = type(module).forward.__module__.split(".")[0]
        is_special = isinstance(module, nn.Linear) and defined_in not in ("torch", "bitsandbytes", "accelerate")
        in_head = isinstance(module, nn.Linear) and name.split(".")[0] in heads
        if is_special or in_head or (is_mamba and name.rsplit(".", 1)[-1] in _MAMBA_MODULES):
            names.append(name)
    return names or None


def linear_names(model: nn.Module) -> list[str]:
    """Return the last parts of the names of all Linear modules, the output head included, e.g. ``q_proj``."""
    return sorted({name.rsplit(".", 1)[-1] for name, module in model.named_modules() if _is_linear(module)})


def require_targets(recipe: Recipe, model: nn.Module, *, is_partial: bool = False) -> None:
    """Raise RecipeError unless every target, whole module and layer index of the Recipe exists in the model.

    PEFT itself complains only when nothing at all matches, so that a misspelt name among others goes unnoticed.
    """
    adapter = recipe.adapter
    names = [name for name, _ in model.named_modules() if name]
    available = ", ".join(linear_names(model)) or "none"
    problems: list[Problem] = []
    if isinstance(adapter.target_modules, str):
        if not _matched_by_text(adapter.target_modules, model):
            problems.append(
                Problem(
                    "adapter.target_modules",
                    f"{adapter.target_modules!r} matches no module of this model. Linear modules are: {available}.",
                    (("adapter.target_modules", "all-linear"),),
                )
            )
    else:
        missing = [target for target in adapter.target_modules if not _any_ends_with(names, target)]
        if missing:
            problems.append(
                Problem(
                    "adapter.target_modules",
                    f"{', '.join(missing)} match{'es' if len(missing) == 1 else ''} no module of this model. "
                    f"Linear modules are: {available}.",
                    (("adapter.target_modules", "all-linear"),),
                )
            )
    missing = [target for target in adapter.modules_to_save if not _any_ends_with(names, target)]
    if missing:
        problems.append(
            Problem(
                "adapter.modules_to_save",
                f"{', '.join(missing)} is no module of this model. Linear modules are: {available}.",
                (("adapter.modules_to_save", ()),),
            )
        )
    num_layers = _num_layers(model)
    beyond = [index for index in adapter.layers_to_transform if index >= num_layers]
    if beyond and (not is_partial or len(beyond) == len(adapter.layers_to_transform)):
        problems.append(
            Problem(
                "adapter.layers_to_transform",
                f"layer {beyond[0]} does not exist; this model has layers 0 to {num_layers - 1}.",
                (("adapter.layers_to_transform", ()),),
            )
        )
    if problems:
        raise RecipeError(problems)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return ``(all, trainable)`` parameters; packed 4-bit weights are counted unpacked."""
    total = trainable = 0
    for parameter in model.parameters():
        count = parameter.numel()
        if type(parameter).__name__ == "Params4bit" and parameter.dtype == torch.uint8:
            count *= 2
        total += count
        trainable += count if parameter.requires_grad else 0
    return total, trainable


def _is_linear(module: nn.Module) -> bool:
    # transformers' Conv1D (GPT-2) is a Linear with its weight transposed; PEFT adapts it as well.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _any_ends_with(names: list[str], target: str) -> bool:
    return any(name == target or name.endswith("." + target) for name in names)


def _matched_by_text(pattern: str, model: nn.Module) -> list[str]:
    """Return the modules that a text target means: ``all-linear``, or a regular expression for the whole name."""
    if pattern.lower() == "all-linear":
        head = getattr(model, "get_output_embeddings", lambda: None)()
        return [name for name, module in model.named_modules() if _is_linear(module) and module is not head]
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise RecipeError(
            [
                Problem(
                    "adapter.target_modules",
                    f"{pattern!r} is no regular expression ({error}).",
                    (("adapter.target_modules", "all-linear"),),
                )
            ]
        ) from None
    return [name for name, _ in model.named_modules() if expression.fullmatch(name)]


def _num_layers(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        count = getattr(config.get_text_config(), "num_hidden_layers", None)
        if count:
            return int(count)
    found = [int(match) for name, _ in model.named_modules() for match in _LAYER_INDEX.findall(f".{name}.")]
    return max(found, default=-1) + 1


def _take_base_dtype(model: nn.Module) -> None:
    """Give meta adapter weights the dtype of their base layer, as PEFT does where it moves real ones."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        base_dtype = module.get_base_layer().weight.dtype
        if not base_dtype.is_floating_point:
            continue
        for name in (*module.adapter_layer_names, *module.other_param_names):
            part = getattr(module, name, None)
            if isinstance(part, nn.Module):
                part.to(base_dtype)
