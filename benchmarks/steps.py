"""The training steps that benchmarks run: model, optimizer and loop as the trainer makes them, without a session."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.components.model import build_model, resolve_precision
from workbench.components.optimizer import build_optimizer
from workbench.components.source import find_source
from workbench.components.step import micro_step
from workbench.estimate import BatchShape
from workbench.hardware import Device
from workbench.recipe import Recipe


@dataclass(frozen=True)
class Configuration:
    """One run: a model and the fields that differ from the base.

    Attributes:
        name: Short, unique in its benchmark.
        model: Inline config (random weights), or the name of a model that has weights.
        changes: Recipe fields.
        batch_size, length: Of every micro-batch; all tokens are real.
        keeps_events: Whether the allocator's events are worth storing.
    """

    name: str
    model: dict[str, Any] | str
    changes: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 4
    length: int = 1024
    keeps_events: bool = False

    def recipe(self) -> Recipe:
        """Return its Recipe; what it does not set is turned off, so that a name says all that is on."""
        named = isinstance(self.model, str)
        return Recipe().with_changes(
            {
                **({"model.name_or_path": self.model} if named else {"model.config": self.model}),
                "model.dtype": "auto" if named else self.model["dtype"],  # type: ignore[index]  # an inline config
                "data.max_length": self.length,
                "training.per_device_train_batch_size": self.batch_size,
                "training.gradient_accumulation_steps": 1,
                "training.mixed_precision": "no",
                "evaluation.split": "none",
                **self.changes,
            }
        )

    def shape(self) -> BatchShape:
        """Return the batches as the estimate takes them."""
        return BatchShape(self.batch_size, self.length, float(self.length), float(self.length), False, "max_length")


class Steps:
    """A model in place, ready to train steps on random tokens.

    Args:
        recipe: The settings; batch size and length are taken from it.
        device: The device that runs; it decides dtypes.
        place: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, recipe: Recipe, device: Device, place: str) -> None:
        self.recipe, self.place = recipe, place
        self.model = load_model(recipe, device, place)
        self.optimizer = build_optimizer(recipe, self.model)
        self._precision = resolve_precision(recipe, device)
        self._scaler = torch.amp.GradScaler(place) if self._precision.uses_grad_scaler else None
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._num_tokens = int(self.model.get_input_embeddings().weight.shape[0])
        self.loss = 0.0

    def run(self, num_steps: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
        """Train steps; returns the seconds of each by ``clock``."""
        seconds = []
        for _ in range(num_steps):
            batches = [self._batch() for _ in range(self.recipe.training.gradient_accumulation_steps)]
            began = clock()
            self._step(batches)
            if self.place == "cuda":
                torch.cuda.synchronize()
            seconds.append(clock() - began)
        return seconds

    def _step(self, batches: list[dict[str, torch.Tensor]]) -> None:
        size, length = batches[0]["input_ids"].shape
        num_items = torch.tensor(size * (length - 1) * len(batches), device=self.place)
        for batch in batches:
            self.loss = float(micro_step(self.recipe, self.model, batch, num_items, self._precision, self._scaler))
        limit = self.recipe.training.max_grad_norm
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        if limit:
            torch.nn.utils.clip_grad_norm_(self._parameters, limit)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.model.zero_grad()

    def _batch(self) -> dict[str, torch.Tensor]:
        shape = (self.recipe.training.per_device_train_batch_size, self.recipe.data.max_length)
        tokens = torch.randint(0, self._num_tokens, shape, device=self.place)
        return {"input_ids": tokens, "labels": tokens.clone()}


def load_model(recipe: Recipe, device: Device, place: str) -> Any:
    """Return the model; random weights where only a config is known, quantized ones by way of a checkpoint."""
    source = find_source(recipe, for_training=False)
    if source.has_weights or not recipe.quantization.bits:
        return build_model(recipe, source, device, place=place, allow_random_weights=True)
    with tempfile.TemporaryDirectory() as folder:
        plain = recipe.with_changes(
            {"adapter.method": "none", "quantization.load_in_4bit": False, "quantization.load_in_8bit": False}
        )
        build_model(plain, source, device, place="cpu", allow_random_weights=True).save_pretrained(folder)
        stored = recipe.with_changes({"model.name_or_path": folder, "model.config": None})
        return build_model(stored, find_source(stored, for_training=False), device, place=place)
