"""From a Recipe to everything the engine needs, in stages that show progress and can be cancelled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..components.collator import build_collator
from ..components.data import prepare_data
from ..components.model import build_model
from ..components.optimizer import build_optimizer, build_schedule
from ..components.precision import Precision, resolve_precision
from ..components.source import find_source, load_tokenizer
from ..components.task import CLASSIFICATION, own_labels, with_classes
from ..events import Cancel, ProgressCallback
from ..hardware import Device
from ..recipe import Recipe
from .arguments import count_steps

if TYPE_CHECKING:
    from ..components.data import PreparedData
    from ..components.source import ModelSource


@dataclass
class Run:
    """What was built for one run; dropped as a whole when the run ends.

    Attributes:
        recipe: The settings.
        device: The device it runs on.
        source: Where the model came from.
        tokenizer: The model's tokenizer.
        data: Training and held-out samples.
        collator: Samples to CPU tensors.
        model: In train mode, on the device.
        optimizer, schedule: Over the trainable parameters.
        precision: Dtypes.
        num_steps: Optimizer steps of the whole run.
    """

    recipe: Recipe
    device: Device
    source: ModelSource
    tokenizer: Any
    data: PreparedData
    collator: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    precision: Precision
    num_steps: int


def build_run(recipe: Recipe, device: Device, *, progress: ProgressCallback, cancel: Cancel) -> Run:
    """Find the model, prepare the data, load the model, make the optimizer.

    The data comes before the weights: what is wrong with it shows before gigabytes are read.

    Raises:
        WorkbenchError: One sentence about what cannot be found, read or built.
        Cancelled: The user cancelled.
    """
    from transformers import set_seed

    source = find_source(recipe, for_training=True, progress=progress, cancel=cancel)
    tokenizer = load_tokenizer(source)
    cancel.check()
    known = own_labels(source.config) if recipe.model.task == CLASSIFICATION else ()
    data = prepare_data(recipe, tokenizer, known_classes=known, progress=progress, cancel=cancel)
    cancel.check()
    collator = build_collator(recipe, tokenizer)
    source = with_classes(recipe, source, data.classes, collator.pad_token_id)
    set_seed(recipe.training.seed)  # The adapter's random start.
    place = "cuda" if device.has_caching_allocator else "cpu"
    model = build_model(recipe, source, device, place=place, progress=progress, cancel=cancel)
    if "/" in source.name and source.kind == "hub" and hasattr(model, "peft_config"):
        # The adapter shall name its base by its id, not by a folder of this machine's cache.
        configs: Any = model.peft_config
        for config in configs.values():
            config.base_model_name_or_path = source.name
    cancel.check()
    num_steps = count_steps(recipe, len(data.train))
    optimizer = build_optimizer(recipe, model)
    return Run(
        recipe=recipe,
        device=device,
        source=source,
        tokenizer=tokenizer,
        data=data,
        collator=collator,
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(recipe, optimizer, num_steps),
        precision=resolve_precision(recipe, device),
        num_steps=num_steps,
    )
