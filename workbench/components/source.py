"""Where a model comes from: built in, a local folder, the catalogue, the hub, or a config written in the Recipe."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..events import Cancel, ProgressCallback
from ..recipe import Recipe
from . import catalogue, hub
from .packing import require_isolation
from .starting import starting_recipe
from .task import CAUSAL, SEQ2SEQ, TASKS, model_class, tasks_of, with_classes
from .tokenizer import has_tokenizer_files, load_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["ModelSource", "find_source", "load_tokenizer", "model_names"]

# What a model folder on the hub needs to be trained: no other weight formats, no code.
HUB_FILES: tuple[str, ...] = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.model",
    "*.txt",
    "*.jinja",
    "*.tiktoken",
)


@dataclass(frozen=True)
class ModelSource:
    """A model that was found.

    Attributes:
        name: As the user wrote it.
        kind: ``"builtin"``, ``"folder"``, ``"catalogue"``, ``"hub"`` or ``"inline"``.
        config: Config of the whole model.
        path: Local folder with weights and tokenizer; None where only a config is known.
        revision: Revision on the hub that was asked for, or None.
        has_weights: False: enough to estimate, not to train.
        has_tokenizer: Whether ``load_tokenizer`` works.
        note: Licence or provenance worth showing; may be empty.
        trust_remote_code: Whether the Recipe allows the model's own Python.
        task: What it is used for.
        new_tokens: Tokens that the run adds to the tokenizer.
    """

    name: str
    kind: str
    config: PretrainedConfig
    path: str | None
    revision: str | None
    has_weights: bool
    has_tokenizer: bool
    note: str = ""
    trust_remote_code: bool = False
    task: str = CAUSAL
    new_tokens: tuple[str, ...] = ()


def model_names() -> list[str]:
    """Return the names that need no hub: the built-in models that can be trained, then the catalogue."""
    from . import smollm2, tiny_llama

    builtin = [smollm2.NAME, tiny_llama.NAME]
    return builtin + [row.name for row in catalogue.catalogue() if row.name not in builtin]


def find_source(
    recipe: Recipe,
    *,
    for_training: bool,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> ModelSource:
    """Find the model of ``recipe``; fetch it where it is to be trained and not on this machine yet.

    Args:
        for_training: Weights are needed. False asks for a config only, without a request for a model of the catalogue.
        progress: Told about fetching and converting.
        cancel: Ends fetching.

    Returns:
        The source. With ``for_training`` it has weights in a local folder.

    Raises:
        RecipeError: The adapter it starts from does not fit the settings.
        ModelError: The model is unknown, gated, broken, needs code that the Recipe does not allow, has no weights where
            they are needed, lets packed samples see each other while the Recipe packs, or the hub does not answer.
        Cancelled: The user cancelled.
    """
    task = recipe.model.task
    starting_recipe(recipe)  # What is wrong with the adapter it starts from shows before anything is fetched.
    found = _find(recipe, for_training, progress, cancel)
    source = with_classes(recipe, dataclasses.replace(found, task=task, new_tokens=recipe.model.new_tokens))
    if model_class(task, source.config) is None and not source.trust_remote_code:
        raise ModelError(_other_task(source.name, source.config, task))
    if recipe.data.packing:
        require_isolation(source.config, source.name)
    if for_training and not source.has_weights:
        raise ModelError(
            f"{source.name!r} is known by its config only, which is enough to estimate, not to train. "
            "Choose a model with weights, such as smollm2-135m-instruct, a hub id or a local folder."
        )
    return source


def _find(recipe: Recipe, for_training: bool, progress: ProgressCallback | None, cancel: Cancel | None) -> ModelSource:
    from . import smollm2, tiny_llama

    model = recipe.model
    name = model.name_or_path.strip()
    if model.config is not None:
        return _inline_source(model.config, model.task)
    builtin: dict[str, Callable[..., str]] = {smollm2.NAME: smollm2.prepare, tiny_llama.NAME: tiny_llama.prepare}
    if name.lower() in builtin:
        module = smollm2 if name.lower() == smollm2.NAME else tiny_llama
        # A name the user typed never decides which folder is read: the module's own cache folder does.
        path = builtin[name.lower()](progress=progress, cancel=cancel) if for_training else module.prepared_folder()
        config = _read_folder_config(Path(path), False, model.task) if path else module.config()
        return ModelSource(name, "builtin", config, path, None, path is not None, path is not None, module.NOTE)
    folder = Path(name).expanduser()
    if folder.is_dir() or (folder.is_file() and folder.suffix == ".json"):
        return _folder_source(name, folder, recipe, for_training)
    if name.startswith((".", "~", os.sep)) or not hub.looks_like_hub_id(name):
        raise ModelError(f"{name!r} is no folder on this machine and no possible hub id. {_suggest(name)}")
    return _named_source(recipe, name, for_training, progress, cancel)


def _named_source(
    recipe: Recipe, name: str, for_training: bool, progress: ProgressCallback | None, cancel: Cancel | None
) -> ModelSource:
    """Find a hub id or catalogue name: the local cache first, then the catalogue, then one question to the hub."""
    model, row = recipe.model, catalogue.find_row(name)
    revision = model.revision
    hub_name = row.hub_id if row is not None and "/" not in name else name
    cached = hub.cached_snapshot(hub_name, kind="model", revision=revision)
    if cached and (not for_training or _missing_weights(Path(cached)) is None):
        return _hub_source(name, cached, recipe, for_training, row)
    if row is not None and not for_training and revision is None:
        return ModelSource(name, "catalogue", catalogue.config_of(row), None, None, False, False, _row_note(row))
    try:
        hub.require_repo(hub_name, kind="model", revision=revision, cancel=cancel)
    except ModelError as error:
        hint = "" if row is not None else " " + _suggest(name)
        raise ModelError(f"{error}{hint}") from error
    files = (HUB_FILES if for_training else ("config.json",)) + (("*.py",) if model.trust_remote_code else ())
    path = hub.download(hub_name, patterns=files, revision=revision, progress=progress, cancel=cancel)
    return _hub_source(name, path, recipe, for_training, row)


def _hub_source(
    name: str, path: str, recipe: Recipe, for_training: bool, row: catalogue.CatalogueRow | None
) -> ModelSource:
    found = _folder_source(name, Path(path), recipe, for_training)
    note = _row_note(row) if row is not None else f"From https://huggingface.co/{name}; its licence is on that page."
    return ModelSource(
        name,
        "hub",
        found.config,
        path,
        recipe.model.revision,
        found.has_weights,
        found.has_tokenizer,
        note,
        recipe.model.trust_remote_code,
    )


def _row_note(row: catalogue.CatalogueRow) -> str:
    gated = ", gated" if row.gated else ""
    return f"{row.hub_id}, licence {row.license}{gated}." + (f" {row.note}" if row.note else "")


def _inline_source(values: Mapping[str, Any], task: str) -> ModelSource:
    name = f"inline {values.get('model_type', 'config')}"
    config = _config_from_values(values, "model.config", task)
    return ModelSource(
        name, "inline", config, None, None, False, False, "Written out in the Recipe: a config without weights."
    )


def _folder_source(name: str, folder: Path, recipe: Recipe, for_training: bool) -> ModelSource:
    task, trust_remote_code = recipe.model.task, recipe.model.trust_remote_code
    if folder.is_file():
        config = _config_from_values(_read_json(folder), str(folder), task)
        return ModelSource(name, "folder", config, None, None, False, False, "A config without weights.")
    config = _read_folder_config(folder, trust_remote_code, task)
    missing = _missing_weights(folder)
    has_tokenizer = has_tokenizer_files(folder)
    if for_training and missing:
        raise ModelError(
            f"{name!r} cannot be trained: {missing}. Save it with save_pretrained; as it is, it can only be estimated."
        )
    if for_training and not has_tokenizer:
        raise ModelError(f"{name!r} has no tokenizer files. Save the model's tokenizer into the same folder.")
    note = "" if missing is None else "A config without weights."
    return ModelSource(
        name, "folder", config, str(folder), None, missing is None, has_tokenizer, note, trust_remote_code
    )


def _missing_weights(folder: Path) -> str | None:
    """Return what is missing to load weights from ``folder``, or None when all is there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        names = sorted({str(shard) for shard in shards.values()}) if isinstance(shards, dict) else []
        absent = [shard for shard in names if not (folder / shard).is_file()]
        if absent or not names:
            return f"{index.name} names {absent[0] if absent else 'no file'}, which is not there"
        return None
    if (folder / "model.safetensors").is_file():
        return None
    if any(folder.glob("pytorch_model*.bin")):
        # The older format is a pickle, which can run code when it is read.
        return "its weights are in the older .bin format, not in safetensors"
    return "it holds no weights (model.safetensors)"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror or error}). Give a folder with config.json."
        ) from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text. Save the config again.") from error
    except ValueError as error:
        where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ModelError(f"{path}{where} is not JSON ({reason}). Save the config again.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__}, not a config. Save the config again.")
    return values


def _read_folder_config(folder: Path, trust_remote_code: bool, task: str) -> PretrainedConfig:
    path = folder / "config.json"
    if not path.is_file():
        adapter = " It holds an adapter: give its base model." if (folder / "adapter_config.json").is_file() else ""
        raise ModelError(f"{folder} holds no config.json.{adapter or ' Give the folder that save_pretrained wrote.'}")
    values = _read_json(path)
    if trust_remote_code and values.get("auto_map"):
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        except Exception as error:  # foreign code raises what it likes
            raise ModelError(f"The code of {folder} cannot make its config ({_first_line(error)}).") from error
    return _config_from_values(values, str(path), task)


def _other_task(where: str, config: PretrainedConfig, task: str) -> str:
    """Say that a model does not do a task, and what it does."""
    others = tasks_of(config)
    hint = f"Set model.task={others[0]}." if others else "Choose another model."
    return (
        f"{where} describes a {config.model_type} model; only {TASKS[task].models} can be trained with "
        f"model.task={task}. {hint}"
    )


def _config_from_values(values: Mapping[str, Any], where: str, task: str) -> PretrainedConfig:
    """Return a config that transformers has the code of for the task."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    fields = dict(values)
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(
            f"{where} has no model_type. Give the config.json of a causal language model, such as a llama."
        )
    if model_type not in CONFIG_MAPPING:
        if fields.get("auto_map"):
            raise ModelError(
                f"{where} needs the model's own Python code (model_type {model_type!r}). "
                "Set model.trust_remote_code=true only if you trust its author."
            )
        raise ModelError(
            f"{where} has the model_type {model_type!r}, which this transformers does not know. {_suggest(model_type)}"
        )
    try:
        config = CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:  # each config class checks its fields in its own way
        raise ModelError(f"{where} cannot be used ({_first_line(error)}). Correct that field.") from error
    if model_class(task, config) is None:
        raise ModelError(_other_task(where, config, task))
    if task == SEQ2SEQ and not config.is_encoder_decoder:
        raise ModelError(
            f"{where} describes a {model_type} model, which transformers lists among the encoder-decoders, though it "
            "continues what it reads. Choose an encoder-decoder, such as T5 or BART."
        )
    is_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", True)
    if task == CAUSAL and is_encoder and not getattr(config, "is_encoder_decoder", False):
        # As a language model it would see the very tokens it is to predict. (Of an encoder-decoder, transformers takes
        # the decoder alone.)
        raise ModelError(
            f"{where} describes an encoder ({model_type}); only causal language models can be trained with "
            f"model.task={task}. Set model.task=sequence-classification, or is_decoder in its config."
        )
    _check_sizes(config, where)
    return config


def _check_sizes(config: PretrainedConfig, where: str) -> None:
    """Raise ModelError for sizes no model can have, which would otherwise fail deep inside a layer."""
    try:
        text = config.get_text_config()
    except ValueError as error:  # MusicGen: it reads text with one model and writes audio with the other
        raise ModelError(
            f"{where} describes a {config.model_type} model, which holds several language models, so that none of them "
            "is the one to train. Choose another model."
        ) from error
    if getattr(text, "is_heterogeneous", False):
        return  # Sizes differ from layer to layer; the config class has checked them.
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        size = getattr(text, field, None)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ModelError(f"{where} has {field}={size!r}; it must be a whole number above 0.")
    heads = getattr(text, "num_attention_heads", None)
    groups = getattr(text, "num_key_value_heads", None)
    if heads and isinstance(groups, int) and groups > 0 and heads % groups:
        raise ModelError(f"{where} has {heads} attention heads, which num_key_value_heads={groups} does not divide.")


def _suggest(name: str) -> str:
    near = catalogue.near_names(name)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return "Known without a hub are smollm2-135m-instruct, tiny-llama and the names that `workbench models` lists."


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (" ".join(lines[:2])[:240] if lines else type(error).__name__).rstrip(".")
