"""Start from an adapter that was trained before: its shape takes over, its weights are loaded.

What its file decides (rank, scale, targets) cannot be chosen again; a Recipe that asks for something else is refused by
name before anything loads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ModelError, Problem, RecipeError
from ..recipe import Recipe, field_info
from .own_adapter import CONFIG, WEIGHTS, adapter_tensors, read_own_adapter

FIELD = "adapter.name_or_path"
PEFT_CONFIG = "adapter_config.json"
# What an adapter_config.json decides, under the same names in the Recipe.
_TAKEN_OVER = ("r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save", "layers_to_transform")
# What the workbench does not train on; empty in what it writes itself.
_UNKNOWN = ("rank_pattern", "alpha_pattern", "lora_bias", "megatron_config", "use_qalora", "target_parameters")


def starting_recipe(recipe: Recipe) -> Recipe:
    """Return the Recipe with what the adapter it starts from decides; the same Recipe where it starts from none.

    Raises:
        RecipeError: The folder holds no adapter of this kind, or the Recipe asks for another shape than it has.
    """
    if recipe.adapter.name_or_path is None:
        return recipe
    folder = _folder(recipe)
    values = _bottleneck_values(folder) if recipe.adapter.method == "bottleneck" else _lora_values(recipe, folder)
    problems, changes = [], {}
    for name, value in values.items():
        path = f"adapter.{name}"
        wanted = recipe.get(path)
        if wanted != field_info(path).default and _plain(wanted) != _plain(value):
            text = f"{wanted!r} is not what the adapter in {folder} has, which is {value!r}."
            problems.append(Problem(path, text, ((path, value),)))
        changes[path] = value
    if problems:
        raise RecipeError(problems)
    return recipe.with_changes(changes)


def start_notes(recipe: Recipe) -> list[str]:
    """Return what a person should know of the adapter that a run starts from."""
    if recipe.adapter.name_or_path is None:
        return []
    found, folder = starting_recipe(recipe).adapter, _folder(recipe)
    if found.method == "bottleneck":
        base = read_own_adapter(folder)[0].base_model
        notes = [f"Starts from the bottleneck adapter in {folder}: bottleneck_size={found.bottleneck_size}."]
    else:
        base = str(_read(folder).get("base_model_name_or_path") or "")
        notes = [f"Starts from the adapter in {folder}: r={found.r}, lora_alpha={found.lora_alpha}."]
    if base and Path(base).name != Path(recipe.model.name_or_path).name:
        notes.append(f"That adapter names {base} as its base; this run's is {recipe.model.name_or_path}.")
    return notes


def starting_config(recipe: Recipe) -> Any:
    """Return PEFT's config of the adapter a run starts from, ready to train."""
    from peft import LoraConfig

    config: Any = LoraConfig.from_pretrained(str(_folder(recipe)))
    config.inference_mode, config.lora_dropout = False, recipe.adapter.lora_dropout
    config.base_model_name_or_path = None  # PEFT writes the one it is attached to.
    return config


def load_start(recipe: Recipe, model: Any) -> None:
    """Read the weights of the adapter a run starts from into the one that was attached.

    Raises:
        ModelError: They are of another base: names or shapes differ.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = _folder(recipe)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"The adapter in {folder} cannot be read ({error}). Give another {FIELD}.") from error
    if recipe.adapter.method == "bottleneck":
        expected = adapter_tensors(model)
    else:
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    wrong = sorted(
        name
        for name in expected.keys() | tensors.keys()
        if name not in expected or name not in tensors or expected[name].shape != tensors[name].shape
    )
    if wrong:
        name = wrong[0]
        shapes = [str(tuple(part[name].shape)) if name in part else "missing" for part in (tensors, expected)]
        raise ModelError(
            f"The adapter in {folder} does not fit {recipe.model.name_or_path}: {len(wrong)} tensors differ, such as "
            f"{name} ({shapes[0]} there, {shapes[1]} needed). Give the base that it was trained on."
        )
    if recipe.adapter.method == "bottleneck":
        model.load_state_dict(tensors, strict=False)
    else:
        set_peft_model_state_dict(model, tensors)


def require_attached_to(model: nn.Module, recipe: Recipe) -> None:
    """Check that the targets of the adapter exist in the base at all, which PEFT reports in words of its own."""
    config = starting_config(recipe)
    targets = config.target_modules
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    if isinstance(targets, str) or any(str(target).rsplit(".", 1)[-1] in names for target in targets):
        return
    raise ModelError(
        f"The adapter in {_folder(recipe)} is for modules {', '.join(sorted(targets))}, of which "
        f"{recipe.model.name_or_path} has none. Give the base that it was trained on."
    )


def _folder(recipe: Recipe) -> Path:
    folder = Path(str(recipe.adapter.name_or_path)).expanduser()
    return folder / "adapter" if (folder / "adapter").is_dir() else folder


def _read(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / PEFT_CONFIG).read_text(encoding="utf-8"))
    return values


def _lora_values(recipe: Recipe, folder: Path) -> dict[str, Any]:
    try:
        values = _read(folder)
    except (OSError, ValueError) as error:
        own = " It holds bottleneck adapters: set adapter.method=bottleneck." if (folder / CONFIG).is_file() else ""
        text = f"{folder} holds no PEFT adapter that can be read ({error}).{own}"
        raise RecipeError([Problem(FIELD, text, ((FIELD, None),))]) from error
    kind = values.get("peft_type")
    unknown = [name for name in _UNKNOWN if values.get(name)]
    if values.get("bias", "none") != "none":
        unknown.append("bias")
    if kind != "LORA" or unknown:
        what = f"is of type {kind}" if kind != "LORA" else f"uses {', '.join(unknown)}"
        raise RecipeError(
            [Problem(FIELD, f"the adapter in {folder} {what}; plain LoRA can be trained on.", ((FIELD, None),))]
        )
    if values.get("trainable_token_indices") and not recipe.model.new_tokens:
        text = f"the adapter in {folder} has rows for new tokens. Name the same tokens in model.new_tokens."
        raise RecipeError([Problem(FIELD, text, ((FIELD, None),))])
    found = {name: values.get(name) for name in _TAKEN_OVER}
    for name in ("modules_to_save", "layers_to_transform"):
        value = found[name]
        found[name] = (value,) if isinstance(value, int) else tuple(value or ())
    targets = found["target_modules"]
    found["target_modules"] = targets if isinstance(targets, str) else tuple(sorted(targets or ()))
    return found


def _bottleneck_values(folder: Path) -> dict[str, Any]:
    try:
        adapter, _ = read_own_adapter(folder)
    except ModelError as error:
        raise RecipeError([Problem(FIELD, str(error), ((FIELD, None),))]) from error
    if adapter.kind != "bottleneck":
        raise RecipeError([Problem(FIELD, f"{folder} holds no bottleneck adapters.", ((FIELD, None),))])
    return {
        "bottleneck_size": int(adapter.settings["size"]),
        "layers_to_transform": tuple(adapter.settings["layers"]),
        "modules_to_save": tuple(adapter.settings["train_whole"]),
    }


def _plain(value: Any) -> Any:
    return frozenset(value) if isinstance(value, tuple | list) else value
