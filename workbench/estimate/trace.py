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
from .modules import kept_map
from .optimizers import clip_gradients, new_optimizer, step_optimizer
from .quantized import quant_parts
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
    """

    batch_size: int
    length: int
    eval_batch_size: int
    padded: bool
    packed: bool
    num_supervised: int | None = None


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


def is_adapter(module_name: str) -> bool:
    """Whether a module belongs to a PEFT adapter, which is attached after the base was loaded."""
    return ".lora_" in module_name or ".modules_to_save" in module_name


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

    Raises:
        Cancelled: The user cancelled.
    """
    supervised = shape.num_supervised
    recorder = MetaRecorder(
        model,
        answer=not (shape.padded or shape.packed),
        num_true=shape.batch_size * (shape.length - 1) if supervised is None else supervised,
        capability=device.compute_capability,
    )
    recorder.cancel = cancel
    mode = TargetMode(device, script.sdpa_kernel)
    precision = TargetPrecision.of(resolve_precision(recipe, device), mode)
    runner = _Checkpointing(recorder, mode)
    mode.on_backward = functools.partial(recorder.begin_phase, "backward")
    mode.on_new_tensor = recorder.note_tensor
    mode.on_attention = recorder.add_attention
    try:
        with _graph_on(), _quiet(), answers_of(mode), script.around(), runner.installed(model), mode, recorder:
            driver = _Driver(recipe, model, shape, recorder, precision, load_dtype, cancel, script)
            driver.load()
            driver.run(mode.kind == "cuda")
    finally:
        recorder.close()
        for parameter in model.parameters():
            parameter.grad = None
        model.train()
    num_layers = 1 + max(recorder.tape.module_layers)
    return Trace(recorder.tape, num_layers)


@contextlib.contextmanager
def _graph_on() -> Iterator[None]:
    """Record gradients whatever the calling thread does (grad mode is thread-local)."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what bitsandbytes logs about the dtypes of a trace; messages of other threads pass."""
    thread = threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger = logging.getLogger("bitsandbytes.autograd._functions")
    logger.addFilter(keep)
    try:
        yield
    finally:
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
        load_dtype: torch.dtype,
        cancel: Cancel | None,
        script: Script,
    ) -> None:
        self._load_dtype = load_dtype
        self._script, self._kept = script, None
        self._recipe, self._model, self._shape = recipe, model, shape
        self._recorder, self._precision, self._cancel = recorder, precision, cancel

    def load(self) -> None:
        """Record how the model comes onto the device.

        Segments: ``load`` (each weight in the dtype of the file; a quantized one for a moment beside its packed form),
        ``prepare`` (what is cast to float32 exists twice for a moment), ``adapter``.

        Source:
            ``create_quantized_param``, transformers/quantizers/; ``prepare_model_for_kbit_training``,
            peft/utils/other.py.
        """
        recorder, base_itemsize = self._recorder, self._load_dtype.itemsize
        recorder.begin_segment("load", "load")
        casts: list[tuple[str, nn.Parameter, int]] = []
        adapters: list[tuple[str, nn.Parameter]] = []
        known = kept_map(self._model)
        for name, module in zip(known.names, known.modules, strict=True):
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                if is_adapter(name):
                    adapters.append((name, parameter))
                elif not parameter.dtype.is_floating_point:
                    unpacked = module.in_features * module.out_features * base_itemsize
                    whole = recorder.add_bytes(unpacked, "unpacked weight", name)
                    recorder.add_tensor(parameter, "parameter", name)
                    for part in quant_parts(parameter, module):
                        recorder.add_tensor(part, "quant_state", name)
                    recorder.end_bytes(whole)
                elif self._is_cast(parameter):
                    if recorder.token_of(parameter) is None and id(parameter) not in {id(item) for _, item, _ in casts}:
                        token = recorder.add_bytes(parameter.numel() * base_itemsize, "parameter", name)
                        casts.append((name, parameter, token))
                else:
                    recorder.add_tensor(parameter, "parameter", name)
            for buffer in module._buffers.values():
                if buffer is not None and buffer.is_meta:
                    recorder.add_tensor(buffer, "buffer", name)
        recorder.begin_segment("prepare", "load")
        for name, parameter, token in casts:
            recorder.add_tensor(parameter, "parameter", name)
            recorder.end_bytes(token)
        recorder.begin_segment("adapter", "load")
        for name, parameter in adapters:
            recorder.add_tensor(parameter, "parameter", name)

    def _is_cast(self, parameter: nn.Parameter) -> bool:
        """Whether the float32 preparation made this parameter from a 16-bit one."""
        quantization = self._recipe.quantization
        return (
            bool(quantization.bits)
            and quantization.prepare_model_for_kbit_training
            and parameter.dtype == torch.float32
            and self._load_dtype != torch.float32
        )

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
        with torch.no_grad(), self._precision.autocast(""):
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
