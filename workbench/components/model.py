"""The one constructor of models: for the trace (``place="meta"``) and for the real run (``"cpu"``, ``"cuda"``)."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ModelError, WorkbenchError
from ..events import Cancel, Progress, ProgressCallback
from ..hardware import Device
from ..recipe import Recipe
from . import activations, adapter, checkpointing, loss, quantization
from .new_tokens import add_token_rows
from .precision import Precision, load_weight_dtype, resolve_precision
from .pruning import hold_on_meta
from .quiet import expected_report, no_progress_bars
from .task import CLASSIFICATION, auto_class, head_modules, model_class

if TYPE_CHECKING:
    from .source import ModelSource

__all__ = ["Precision", "build_model", "load_weight_dtype", "resolve_precision"]

# transformers sets torch's default dtype and patches initialisers while it constructs a model; both are process-wide,
# so that a trace in one thread and a load in another would mix them.
_CONSTRUCTION = threading.RLock()


def build_model(
    recipe: Recipe,
    source: ModelSource,
    device: Device,
    *,
    place: str,
    num_hidden_layers: int | None = None,
    allow_random_weights: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> nn.Module:
    """Return the model that the Trainer gets, in train mode.

    Base model, then quantized Linear classes, float32 preparation, adapter and checkpointing, in the order of the real
    run, whatever the place.

    Args:
        recipe: The settings.
        source: Where the model comes from.
        device: The device the run is for; it decides dtypes through ``resolve_precision``.
        place: ``"meta"`` builds the same modules without storage and reads no weights; ``"cpu"`` and ``"cuda"`` load.
        num_hidden_layers: Build only so many layers of the same kind; only on ``"meta"``. Where
            ``adapter.layers_to_transform`` names layers, those beyond are left out.
        allow_random_weights: Initialise at random where the source has no weights.
        progress: Told about the stage ``"load"``.
        cancel: Looked at between the stages.

    Raises:
        ModelError: The model cannot be read or built, or has no weights.
        RecipeError: The adapter matches nothing.
        MissingPackageError: bitsandbytes is needed and missing.
        Cancelled: The user cancelled.
    """
    if place not in ("meta", "cpu", "cuda"):
        raise ValueError(f"place is {place!r}; allowed are meta, cpu and cuda.")
    if num_hidden_layers is not None and place != "meta":
        raise ValueError("num_hidden_layers shortens models on the meta device only.")
    _tell(progress, cancel, 0, f"Loading {source.name}")
    config = _prepare_config(source.config, num_hidden_layers)
    weight_dtype = load_weight_dtype(recipe, source, device)
    precision = dataclasses.replace(resolve_precision(recipe, device), weight_dtype=weight_dtype)
    try:
        with _CONSTRUCTION:
            if place == "meta":
                model, quantized = _on_meta(recipe, config, precision)
            else:
                quantized, model = None, _load(recipe, source, config, precision, place, allow_random_weights)
            _tell(progress, cancel, 1, "Preparing" if recipe.adapter.method == "none" else "Preparing the adapter")
            new_ids = add_token_rows(source, model)
            model = quantization.prepare_for_training(recipe, model)
            if recipe.training.loss_type == "chunked_nll" and place != "meta":
                loss.require_plain_head(model)
            base = model
            is_partial = num_hidden_layers is not None
            model = adapter.attach_adapter(recipe, model, is_partial=is_partial, new_token_ids=new_ids)
            if quantized is not None:
                quantization.pack_meta_weights(model, quantized)
            if place == "meta":
                hold_on_meta(recipe, model)
            if recipe.training.gradient_checkpointing:
                # After the adapter: PEFT makes the inputs of a checkpointed model require gradients, see there.
                training = recipe.training
                checkpointing.enable_checkpointing(
                    base, training.gradient_checkpointing_every, training.gradient_checkpointing_keep_first
                )
            activations.keep_activations(recipe, base)
    except (WorkbenchError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # Libraries raise anything here; each becomes one sentence about the model.
        raise ModelError(f"{source.name} cannot be built: {_first_line(error)}") from error
    model.train()
    _tell(progress, cancel, 2, f"Loaded {source.name}")
    return model


def _tell(progress: ProgressCallback | None, cancel: Cancel | None, done: int, message: str) -> None:
    if cancel is not None:
        cancel.check()
    if progress is not None:
        progress(Progress("load", done, 2, message))


def _prepare_config(config: Any, num_hidden_layers: int | None) -> Any:
    """Return a copy of the config without cache and, where asked for, with fewer layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for part in (config, text):
        # A cache that is filled during training leaks between packed samples and is never read.
        part.use_cache = False
    if num_hidden_layers is not None:
        whole = text.num_hidden_layers
        for name, value in list(vars(text).items()):
            if isinstance(value, (list, tuple)) and len(value) == whole and name != "architectures":
                setattr(text, name, type(value)(value[:num_hidden_layers]))
        with contextlib.suppress(NotImplementedError):  # ProphetNet: it has two depths, and is traced whole
            text.num_hidden_layers = num_hidden_layers
    return config


def _on_meta(recipe: Recipe, config: Any, precision: Precision) -> tuple[nn.Module, Any | None]:
    model = _skeleton(recipe, config, precision)
    skip = quantization.skipped_modules(recipe, model) if recipe.quantization.bits else ()
    quantized = quantization.quantization_config(recipe, precision, skip)
    if quantized is not None:
        quantization.quantize_meta_model(model, quantized, precision)
    return model, quantized


def attention_implementation(recipe: Recipe, config: Any) -> str:
    """Return the attention code that is used: models without SDPA (Gemma 2, MPT, gpt-oss) compute it eagerly.

    SDPA is the Recipe's default, so a recipe that names such a model only would otherwise not be a run.
    """
    wanted = recipe.model.attn_implementation
    found = model_class(recipe.model.task, config) if wanted == "sdpa" else None
    if found is not None:
        return "sdpa" if found._supports_sdpa else "eager"
    return wanted


def _skeleton(recipe: Recipe, config: Any, precision: Precision) -> nn.Module:
    wanted = attention_implementation(recipe, config)
    # transformers asks for the package, which an estimate does without.
    needs_package = wanted == "flash_attention_2"
    with torch.device("meta"):
        model = auto_class(recipe).from_config(
            config,
            dtype=precision.weight_dtype,
            attn_implementation="eager" if needs_package else wanted,
            trust_remote_code=recipe.model.trust_remote_code,
        )
    if needs_package:
        if not model._supports_flash_attn:
            raise ModelError(
                f"{type(model).__name__} has no code for flash_attention_2. Set model.attn_implementation=sdpa."
            )
        model.config._attn_implementation = wanted
    _move_to_meta(model, precision.weight_dtype)
    return model


def _move_to_meta(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Give up the storage of weights that were made on the CPU; XLNet makes its own with ``torch.FloatTensor``.

    That constructor knows neither the default device nor the default dtype, in which the checkpoint would be loaded.
    """
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta:
                continue
            if id(parameter) not in moved:
                data = torch.empty_like(parameter, device="meta", dtype=dtype)
                moved[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[name] = moved[id(parameter)]


def _load(
    recipe: Recipe,
    source: ModelSource,
    config: Any,
    precision: Precision,
    place: str,
    allow_random_weights: bool,
) -> nn.Module:
    dtype = precision.weight_dtype
    options: dict[str, Any] = {
        "attn_implementation": attention_implementation(recipe, config),
        "trust_remote_code": recipe.model.trust_remote_code,
    }
    if not source.has_weights or source.path is None:
        if not allow_random_weights or recipe.quantization.bits:
            raise ModelError(
                f"{source.name} has a config but no weights here: it can be estimated, not trained. "
                "Give a hub id or a folder that holds the weights as safetensors."
            )
        with torch.device(place):
            return auto_class(recipe).from_config(config, dtype=dtype, **options)
    if recipe.quantization.bits:
        named = recipe.quantization.llm_int8_skip_modules or recipe.model.task == CLASSIFICATION
        skip = quantization.skipped_modules(recipe, _skeleton(recipe, config, precision)) if named else ()
        options["quantization_config"] = quantization.quantization_config(recipe, precision, skip)
    if place == "cuda" or recipe.quantization.bits:
        options["device_map"] = {"": torch.cuda.current_device() if place == "cuda" else "cpu"}
    try:
        with no_progress_bars(), expected_report(recipe.model.task == CLASSIFICATION):
            # Only safetensors: the older format is a pickle, which runs code when it is read.
            model, found = auto_class(recipe).from_pretrained(
                source.path,
                config=config,
                dtype=dtype,
                revision=source.revision,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    except OSError as error:
        raise ModelError(
            f"The weights of {source.name} cannot be read ({_first_line(error)}). "
            "Give a hub id that this machine reaches, or a folder that holds them as safetensors."
        ) from error
    if recipe.model.task == CLASSIFICATION:
        _require_weights(model, found["missing_keys"], source.name)
    return model


def _require_weights(model: nn.Module, missing: Iterable[str], name: str) -> None:
    """Raise ModelError where weights are missing that no fine-tuning makes; a new head starts at random."""
    heads = tuple(f"{head}." for head in head_modules(model))
    absent = sorted(key for key in missing if not key.startswith(heads))
    if absent:
        raise ModelError(
            f"The weights of {name} lack {len(absent)} tensors of a {type(model).__name__}, such as {absent[0]}. "
            "Choose a model that was saved for this task, or another model.task."
        )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
