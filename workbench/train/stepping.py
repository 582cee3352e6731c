"""The part of the engine that makes the gradients of a step: its micro-batches, how many they are and what fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..components.step import micro_step
from ..events import Event
from ..hardware import target_device
from .build import Run
from .compiling import CompiledForward
from .micro_batches import MicroBatches, batch_event, capacity_of, largest, squared_norm
from .noise_scale import NoiseScale
from .resumable import RUN_STATE, ResumableTrainer
from .sampler import EpochSampler
from .telemetry import COUNTS, TokenCounts

# What the trainer takes for one batch where the engine itself decides how many micro-batches a step has.
_BUNDLE = "micro_batches"


class SteppingTrainer(ResumableTrainer):
    """A trainer whose micro-batches are cut where they do not fit, and whose steps may change in size."""

    _wishes: Any
    _compiled: CompiledForward | None
    _sampler: EpochSampler

    def begin_stepping(self, run: Run) -> None:
        """Take what decides over micro-batches; before the trainer's own ``__init__``."""
        self._counts = TokenCounts()
        self._step_loss: Tensor | None = None
        self.most_slots = 0  # Token slots of the largest micro-batch so far.
        recipe = run.recipe
        emulates = bool(recipe.hardware.emulate) and not run.device.has_caching_allocator
        self.target = target_device(recipe) if emulates else run.device
        self._parts = MicroBatches(recipe, capacity_of(self.target))
        self._noise = NoiseScale(recipe) if recipe.policies.batch == "noise_scale" else None
        self._first_norm: tuple[Tensor, int] | None = None  # Of the first micro-batch: squared norm, tokens.
        self._batches_in_epoch = 0

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], int]:
        """Fetch the micro-batches of one optimizer step and count their supervised tokens."""
        self._clock.begin_step()
        if self._noise is not None:
            num_batches = self._noise.num_micro_batches
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        counts = [batch.pop(COUNTS) for batch in batches]
        self._counts = sum(counts, TokenCounts())
        self._step_loss, self._first_norm = None, None
        parts = self._parts.begin_step(*largest(batches))
        if parts is not None:
            self._tell_batch("The device has room for larger micro-batches.")
        # At least 1: a step without a supervised token has loss 0 and gradients 0, not NaN.
        num_items = max(1, self._counts.supervised)
        if self._noise is not None and batches:
            self._noise.num_taken += len(batches)
            return [{_BUNDLE: batches, "first_tokens": counts[0].supervised}], num_items
        return batches, num_items

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run one micro-step, or all of a step that decides itself how many it has."""
        if self._noise is None:
            return self._micro_batch(model, inputs, num_items_in_batch)
        total: Tensor | None = None
        for batch in inputs[_BUNDLE]:
            loss = self._micro_batch(model, batch, num_items_in_batch)
            if total is None and len(inputs[_BUNDLE]) > 1:
                scale = num_items_in_batch / max(1, inputs["first_tokens"])
                scale /= self._scaler.get_scale() if self._scaler is not None else 1.0
                trainable = [one for one in self._run.model.parameters() if one.requires_grad]
                self._first_norm = (squared_norm(trainable) * scale**2, inputs["first_tokens"])
            total = loss if total is None else total + loss
        assert total is not None  # An empty step is not given to the trainer.
        return total

    def _micro_batch(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """Run forward and backward, after looking whether someone wants to pause or stop."""
        self._clock.add_pause(self._wishes.check())
        if not model.training:
            model.train()
        run = self._run
        batch = self._prepare_inputs(inputs)
        if self._compiled is not None:
            # As a number it would be a constant of the compiled code, which each step would compile anew.
            num_items = torch.as_tensor(num_items, device=self.args.device)

        def compute(part: Any) -> Tensor:
            if self._compiled is None:
                return micro_step(run.recipe, model, part, num_items, run.precision, self._scaler)
            torch.compiler.cudagraph_mark_step_begin()
            # The next replay of a captured graph writes over its loss.
            return micro_step(run.recipe, model, part, num_items, run.precision, self._scaler).clone()

        parts = self._parts.parts
        loss = self._parts.run(batch, compute, lambda: self._run.model.zero_grad(set_to_none=True))
        if self._parts.parts != parts:
            self._tell_batch("A micro-batch did not fit and was cut.")
        self.most_slots = max(self.most_slots, batch["input_ids"].numel())
        self._step_loss = loss if self._step_loss is None else self._step_loss + loss
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0: the trainer's rule of thumb walks over all parameters in every micro-step, and nobody reads it."""
        return 0

    @property
    def _scaler(self) -> Any | None:
        return getattr(self.accelerator, "scaler", None)

    # -- how large a step is ---------------------------------------------------------------------------------------

    @property
    def micro_batch_size(self) -> int:
        """Rows of a forward pass, now."""
        return -(-self._run.recipe.training.per_device_train_batch_size // self._parts.parts)

    @property
    def accumulation(self) -> int:
        """Forward passes of an optimizer step, now."""
        plain = self._run.recipe.training.gradient_accumulation_steps
        return (plain if self._noise is None else self._noise.num_micro_batches) * self._parts.parts

    def _tell_batch(self, reason: str) -> None:
        data = batch_event(self.state.global_step + 1, self.micro_batch_size, self.accumulation, reason)
        self._publisher.publish(Event("batch", data))

    def _measure_noise(self, norm: float) -> None:
        """Take the step's two gradient norms; ``norm`` is that of the whole step, before clipping."""
        if self._noise is None or self._first_norm is None:
            return
        square, tokens = self._first_norm
        passes = self._noise.num_micro_batches
        self._noise.record((float(square), tokens), (norm**2, self._counts.supervised), passes)

    def _end_batch(self) -> dict[str, Any]:
        """Return the step's columns about its size, and decide over the size of the next one."""
        values: dict[str, Any] = {"micro_batch_size": self.micro_batch_size, "accumulation": self.accumulation}
        noise = self._noise
        if noise is None:
            return values
        self.state.epoch = noise.epoch + noise.num_taken / max(1, self._batches_in_epoch)
        values["noise_scale_tokens"] = noise.tokens
        if noise.change() is not None:
            scale = values["noise_scale_tokens"]
            self._tell_batch(f"The gradient noise scale is {scale:,.0f} tokens.")
        return values

    # -- where a step is in the data, where steps differ in size ---------------------------------------------------

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Let epochs follow each other until all steps are done: how many they are depends on the steps' sizes."""
        values: tuple[Any, ...] = super().set_initial_training_values(args, dataloader)
        self._batches_in_epoch = len(dataloader)
        return values if self._noise is None else (sys.maxsize, *values[1:])

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        place = super()._init_training_state(*args, **kwargs)
        checkpoint = self._resumes_from
        if self._noise is None or checkpoint is None:
            return place
        state = json.loads((Path(checkpoint) / RUN_STATE).read_text(encoding="utf-8")).get("noise")
        if state is None:
            return place
        self._noise.restore(state)
        if self._noise.num_taken >= self._batches_in_epoch:
            self._noise.epoch, self._noise.num_taken = self._noise.epoch + 1, 0
        return self._noise.epoch, self._noise.num_taken

    def _run_epoch(self, model: nn.Module, epoch: int, **kwargs: Any) -> None:
        # Not left to accelerate: after a resume it wraps the sampler so that its own call does not arrive.
        self._sampler.set_epoch(epoch)
        if self._noise is not None and epoch != self._noise.epoch:
            self._noise.epoch, self._noise.num_taken = epoch, 0
        super()._run_epoch(model=model, epoch=epoch, **kwargs)

    def _batch_state(self) -> dict[str, Any]:
        return {
            "parts": self._parts.state(),
            **({} if self._noise is None else {"noise": self._noise.state()}),
        }
