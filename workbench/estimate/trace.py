"""Trace a training run on meta tensors: micro-batches, clipping, optimizer steps, evaluation; in the Trainer's order.

The model, the loss and the optimizer come from ``components/``, as in the real run; nothing is built here. What repeats
is traced once: the first micro-batch of a step (gradients are made), a later one (gradients are added to), the first
optimizer step (its state is made) and a second one. ``assemble.py`` lines them up into whole steps.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..components.activations import host_mover
from ..components.checkpointing import checkpoint_runner
from ..components.loss import compute_loss
from ..components.precision import resolve_precision
from ..components.step import micro_step
from ..events import Cancel
from ..hardware import Device
from ..recipe import Recipe
from .batch import batch_of
from .derive import derive_later
from .fake import MetaRecorder
from .loading import Loader
from .optimizers import clip_gradients, new_optimizer, step_optimizer
from .packages import flash_package, flex_package
from .quantized import Card
from .repeat import Repeater
from .script import OUR_TRAINER, Script
from .tape import Tape
from .target import TargetMode, TargetPrecision, answers_of

# One trace at a time: two would only share the same two cores, and models in the cache are used by one trace at once.
_TRACING = threading.Lock()


@dataclass(frozen=True)
class TraceShape:
    """Shapes of the batches that are traced.

    Attributes:
        batch_size, length: Training micro-batch, padding included.
        num_supervised: Tokens of a training micro-batch that are learned; None takes all but the first of each sample.
        eval_batch_size: Samples of an evaluation batch; 0 where nothing is evaluated.
        padded: Whether a mask is passed.
        packed: Whether position ids are passed.
        real_share: Share of a padded batch that is no padding; 1 where it is not known.
    """

    batch_size: int
    length: int
    eval_batch_size: int
    padded: bool
    packed: bool
    num_supervised: int | None = None
    real_share: float = 1.0


@dataclass
class Trace:
    """A traced run.

    Attributes:
        tape: Segments ``load``, ``prepare``, ``adapter``, ``first``, ``later``, ``step``, ``step_again``, ``zero``,
            ``evaluation``.
        num_layers: Layers of the traced model.
    """

    tape: Tape
    num_layers: int


class _Scaler:
    """What GradScaler does to the graph: multiply the loss by a float32 scalar on the device."""

    def __init__(self) -> None:
        self._scale = torch.empty((), dtype=torch.float32, device="meta")

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale


@contextlib.contextmanager
def exclusive(cancel: Cancel | None) -> Iterator[None]:
    """Hold the lock of tracing; a cancelled caller gives up waiting.

    Raises:
        Cancelled: While another trace ran.
    """
    while not _TRACING.acquire(timeout=0.05):
        if cancel is not None:
            cancel.check()
    try:
        yield
    finally:
        _TRACING.release()


def trace_run(
    recipe: Recipe,
    model: nn.Module,
    device: Device,
    shape: TraceShape,
    *,
    load_dtype: torch.dtype,
    cancel: Cancel | None = None,
    script: Script = OUR_TRAINER,
    repeats: tuple[int, int] | None = None,
) -> Trace:
    """Trace one run of ``model``, which lies on the meta device and keeps no trace of this.

    Args:
        recipe: The settings.
        model: From ``build_model(place="meta")``, whole or with few layers.
        device: The target.
        shape: Shapes of the batches.
        load_dtype: Dtype the weights have in memory before anything is quantized or cast.
        cancel: Looked at in every operator.
        script: The training script; its ``adapt`` was already applied to ``model``.
        repeats: ``(layers of model, layers after which their kinds recur)``, where that is known: the evaluation then
            runs one layer of each kind and copies what the others do.

    Raises:
        Cancelled: The user cancelled.
    """
    supervised = shape.num_supervised
    recorder = MetaRecorder(
        model,
        answer=not (shape.padded or shape.packed),
        num_true=shape.batch_size * (shape.length - 1) if supervised is None else supervised,
        card=Card(device.compute_capability, device.sm_count),
    )
    recorder.cancel = cancel
    mode = TargetMode(device, script.sdpa_kernel)
    precision = TargetPrecision.of(resolve_precision(recipe, device), mode)
    runner = _Checkpointing(recorder, mode)
    mode.on_backward = functools.partial(recorder.begin_phase, "backward")
    mode.on_new_tensor = recorder.note_tensor
    mode.on_attention = recorder.add_attention
    try:
        with (
            _graph_on(), _quiet(), answers_of(mode), script.around(), runner.installed(model),
            host_mover(recorder.move_to_host), _packages(recipe, recorder, shape), mode, recorder,
        ):  # fmt: skip
            Loader(recorder, model, recipe, load_dtype, script).record()
            repeater = Repeater(recorder, mode, model, *repeats) if repeats else None
            driver = _Driver(recipe, model, shape, recorder, precision, cancel, script, repeater)
            driver.run(mode.kind == "cuda")
    finally:
        recorder.close()
        for parameter in model.parameters():
            parameter.grad = None
        model.train()
    num_layers = 1 + max(recorder.tape.module_layers)
    return Trace(recorder.tape, num_layers)


def _packages(recipe: Recipe, recorder: MetaRecorder, shape: TraceShape) -> contextlib.AbstractContextManager[None]:
    """Stand in for the attention that is no operator of torch's, where the Recipe asks for it."""
    name = recipe.model.attn_implementation
    if name == "flash_attention_2":
        finding = functools.partial(recorder.finding, shape.real_share)
        return flash_package(recorder.add_attention, finding, shape.packed)
    return flex_package(recorder.add_attention) if name == "flex_attention" else contextlib.nullcontext()


@contextlib.contextmanager
def _graph_on() -> Iterator[None]:
    """Record gradients whatever the calling thread does (grad mode is thread-local)."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what libraries log about the dtypes of a trace; messages of other threads pass."""
    thread = threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        return record.thread != thread

    names = ("bitsandbytes.autograd._functions", "transformers.modeling_flash_attention_utils")
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


class _Checkpointing:
    """Runs checkpointed functions of a trace.

    torch's own recomputation enters ``torch.autocast("cuda")``, which refuses to work without CUDA, and saves and
    restores the process's random state, which a training run in another thread is using. So autocast is hidden from it
    and entered again inside, and the random state is left alone: there are no values to reproduce.
    """

    def __init__(self, recorder: MetaRecorder, mode: TargetMode) -> None:
        self._recorder = recorder
        self._mode = mode

    def __call__(self, function: Any, *args: Any, **_: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        kind = self._mode.kind
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        module = self._recorder.current_module
        contexts = (self._forward(enabled), self._recompute(module, dtype if enabled else None))
        torch.set_autocast_enabled(kind, False)
        try:
            return checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts
            )
        finally:
            torch.set_autocast_enabled(kind, enabled)

    @contextlib.contextmanager
    def _forward(self, enabled: bool) -> Iterator[None]:
        torch.set_autocast_enabled(self._mode.kind, enabled)
        try:
            yield
        finally:
            torch.set_autocast_enabled(self._mode.kind, False)

    @contextlib.contextmanager
    def _recompute(self, module: int, dtype: torch.dtype | None) -> Iterator[None]:
        state = self._recorder.enter_recompute(module)
        try:
            with self._mode, self._mode.autocast(dtype):
                yield
        finally:
            self._recorder.leave_recompute(state)

    @contextlib.contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Take the place of torch's checkpoint in this model's layers and in this thread's loss."""
        layers: list[Any] = [module for module in model.modules() if "_gradient_checkpointing_func" in vars(module)]
        before = [module._gradient_checkpointing_func for module in layers]
        for module in layers:
            module._gradient_checkpointing_func = self
        try:
            with checkpoint_runner(self):
                yield
        finally:
            for module, function in zip(layers, before, strict=True):
                module._gradient_checkpointing_func = function


class _Driver:
    """Runs the segments of one trace."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        shape: TraceShape,
        recorder: MetaRecorder,
        precision: TargetPrecision,
        cancel: Cancel | None,
        script: Script,
        repeater: Repeater | None,
    ) -> None:
        self._script, self._kept, self._repeater = script, None, repeater
        self._recipe, self._model, self._shape = recipe, model, shape
        self._recorder, self._precision, self._cancel = recorder, precision, cancel

    def run(self, on_cuda: bool) -> None:
        """Run every segment once."""
        recorder, recipe, model = self._recorder, self._recipe, self._model
        tape = recorder.tape
        with self._watched_gradients() as accumulated:
            self._micro_batch("first")
        if recipe.training.gradient_accumulation_steps > 1:
            derive_later(tape, accumulated, frozenset(recorder.copied_gradients))
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        for parameter in parameters:
            token = recorder.token_of(parameter.grad)  # type: ignore[arg-type]  # filtered above
            if token is not None:
                tape.categories[token] = "gradient"
        optimizer = new_optimizer(recipe, model, on_cuda=on_cuda)
        for name in ("step", "step_again"):
            self._check()
            recorder.begin_segment(name, "optimizer")
            clip_gradients(parameters, recipe.training.max_grad_norm)
            step_optimizer(recipe, optimizer, recorder, on_cuda=on_cuda)
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, Mapping) else ():
                token = recorder.token_of(value) if isinstance(value, Tensor) else None
                if token is not None:
                    tape.categories[token] = "optimizer_state"
        recorder.begin_segment("zero", "optimizer")
        self._kept = None
        model.zero_grad()
        self._evaluate()
        recorder.begin_segment("end", "end")
        del optimizer

    @contextlib.contextmanager
    def _watched_gradients(self) -> Iterator[dict[int, int]]:
        """Note when each gradient is kept: ``{its token: number of events}``."""
        recorder, accumulated = self._recorder, {}

        def note(parameter: Tensor) -> None:
            token = None if parameter.grad is None else recorder.token_of(parameter.grad)
            if token is not None:
                accumulated[token] = len(recorder.tape.events)

        hooks = [
            parameter.register_post_accumulate_grad_hook(note)
            for parameter in self._model.parameters()
            if parameter.requires_grad
        ]
        try:
            yield accumulated
        finally:
            for hook in hooks:
                hook.remove()

    def _micro_batch(self, name: str) -> None:
        self._check()
        self._recorder.begin_segment(name, "forward")
        batch = self._batch(self._shape.batch_size)
        num_items = torch.empty((), dtype=torch.int64, device="meta")
        self._mark_input(num_items)
        scaler = _Scaler() if self._precision.uses_grad_scaler else None
        if self._script.forward is None:
            micro_step(self._recipe, self._model, batch, num_items, self._precision, scaler)
            return
        with self._precision.autocast(""):
            loss, self._kept = self._script.forward(self._recipe, self._model, batch)
        if not self._script.keeps_outputs:
            self._kept = None
        (loss if scaler is None else scaler.scale(loss)).backward()
        if self._recipe.training.gradient_accumulation_steps > 1:
            self._kept = None  # A segment that is repeated must end what it began.

    def _evaluate(self) -> None:
        if not self._shape.eval_batch_size:
            return
        self._check()
        self._model.eval()
        self._recorder.begin_segment("evaluation", "evaluation")
        batch = self._batch(self._shape.eval_batch_size)
        repeating = contextlib.nullcontext() if self._repeater is None else self._repeater.installed()
        with repeating, torch.no_grad(), self._precision.autocast(""):
            compute_loss(self._recipe, self._model, batch, None)
        del batch

    def _batch(self, batch_size: int) -> dict[str, Tensor]:
        shape, size = self._shape, (batch_size, self._shape.length)
        batch = batch_of(self._recipe, self._model, size, padded=shape.padded, packed=shape.packed)
        for value in batch.values():
            self._mark_input(value)
        return batch

    def _mark_input(self, value: Tensor) -> None:
        token = self._recorder.token_of(value)
        if token is not None:
            self._recorder.tape.categories[token] = "input"

    def _check(self) -> None:
        if self._cancel is not None:
            self._cancel.check()
