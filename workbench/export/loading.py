"""Load what a run trained: whatever kind of result it is, in a process that knows nothing of the run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from ..components.attaching import attach_own_adapter
from ..components.multitask import load_tasks
from ..components.new_tokens import add_token_rows
from ..components.own_adapter import CONFIG
from ..components.pruning import apply_masks, read_masks
from ..components.quiet import no_progress_bars
from ..components.source import ModelSource, find_source, load_tokenizer
from ..components.task import auto_class
from ..components.task_data import task_sets
from ..errors import ExportError
from ..recipe import Recipe


def load_trained(folder: str | Path, *, base: str | None = None) -> tuple[Any, Any]:
    """Return ``(model, tokenizer)`` of a result, ready to answer.

    Args:
        folder: A run folder, its ``adapter/`` or ``model/``, or an exported one that holds ``recipe.yaml``.
        base: Base model of an adapter, where it lies elsewhere than the run's Recipe says.

    Raises:
        ExportError: The folder holds no result.
        ModelError: The base cannot be found or does not fit.

    Example:
        >>> model, tokenizer = load_trained("runs/my-run/adapter")   # doctest: +SKIP
    """
    result = _result_of(Path(folder))
    recipe = Recipe.from_yaml(result / "recipe.yaml")
    if base is not None:
        recipe = recipe.with_changes({"model.name_or_path": base})
    source = find_source(recipe, for_training=True)
    model = load_result(recipe, source, result)
    return model, load_tokenizer(source)


def load_result(recipe: Recipe, source: ModelSource, result: Path) -> Any:
    """Return the model of ``adapter/`` or ``model/`` in evaluation mode, its base unquantized on the CPU.

    Args:
        recipe: The run's settings.
        source: The base.
        result: The folder.
    """
    kind: Any = auto_class(recipe)
    with no_progress_bars(), warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5.24 a question by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        if not holds_adapter(result):
            return kind.from_pretrained(result, use_safetensors=True).eval()
        model = kind.from_pretrained(source.path, revision=source.revision, use_safetensors=True)
        add_token_rows(source, model)
        masks = read_masks(result)
        if masks is not None:
            apply_masks(model.requires_grad_(False), masks)
        if (result / CONFIG).is_file() and recipe.tasks.data:
            model = load_tasks(model, result, list(task_sets(recipe)))
        elif (result / CONFIG).is_file():
            with torch.no_grad():
                attach_own_adapter(model, result)
        else:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(result))
    return model.eval()


def holds_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and not a whole model."""
    return (folder / CONFIG).is_file() or (folder / "adapter_config.json").is_file()


def own_loading(recipe: Recipe) -> str:
    """Return in Markdown how an adapter is loaded that PEFT alone does not load; empty where it does."""
    call = 'from workbench.export import load_trained\n\nmodel, tokenizer = load_trained("THIS FOLDER")'
    with_workbench = f"```python\n{call}\n```\n\nWithout the workbench: "
    if recipe.adapter.method == "bottleneck":
        return with_workbench + (
            "behind each module M that has `M.bottleneck.*` tensors in `adapter_model.safetensors`, put a forward hook "
            "that replaces its output x (or the first of several) by `x + up(gelu(down(x)))`, where `down` and `up` "
            "are Linear layers with these weights."
        )
    if recipe.tasks.data:
        tasks = list(task_sets(recipe))
        return with_workbench + (
            f"each task is a plain PEFT adapter in a folder of its name ({', '.join(tasks)}): "
            f"`peft.PeftModel.from_pretrained(base, folder + '/{tasks[0]}')`. With the workbench "
            f"`model.set_adapter('{tasks[-1]}')` switches."
        )
    if recipe.model.new_tokens and recipe.adapter.method == "lora":
        return with_workbench + (
            "load the tokenizer of this folder, call `base.resize_token_embeddings(len(tokenizer))` on the base model "
            "where its embeddings have fewer rows, then `peft.PeftModel.from_pretrained(base, folder)`."
        )
    return ""


def _result_of(folder: Path) -> Path:
    for result in (folder, folder / "adapter", folder / "model"):
        if (result / "recipe.yaml").is_file() and any(result.glob("*.safetensors")):
            return result
    raise ExportError(
        f"{folder} holds no result (weights beside recipe.yaml). Give the folder of a run that has ended."
    )
