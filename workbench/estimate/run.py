"""estimate_run: a Recipe and a device in, an Estimate out."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..components.adapter import count_parameters
from ..components.freezing import PhaseSwitch
from ..components.layers import has_layer_settings
from ..components.model import build_model, load_weight_dtype
from ..components.source import find_source
from ..components.starting import start_notes, starting_recipe
from ..errors import EstimateError, WorkbenchError
from ..events import Cancel, Progress, ProgressCallback
from ..hardware import Device, target_device
from ..recipe import Recipe, require_valid
from .allocator import start_compiling
from .assemble import MAX_MICRO_BATCHES, line_up
from .cpu_time import slowdown
from .estimate import BatchShape, Estimate, MemoryEstimate
from .garbage import collection_paused
from .keys import cache_key
from .memory import estimate_memory, process_base_bytes
from .optimizers import paged_host_bytes
from .phases import estimate_phases
from .quantized import add_quant_states
from .recorder import HOST_COPY
from .script import OUR_TRAINER, Script
from .shape import full_shape
from .store import StoredTrace, load_trace, save_trace, trace_path
from .structure import layer_lists, layer_period
from .time import estimate_time
from .trace import TraceShape, exclusive, trace_run
from .unroll import TRACED_LAYERS, Life, NotUniformError, traced_layers, unroll, whole

if TYPE_CHECKING:
    from ..components.source import ModelSource

# A panel's effects are about forty changes of one recipe: each finds its model and its trace again. A model on the meta
# device takes about 2 MB, a trace about 3.
MAX_MODELS = 48
MAX_LIVES = 128
# Memory estimates kept with a trace: devices, allocator settings, numbers of micro-batches.
MAX_MEMORIES = 8


@dataclass
class _Built:
    """A model on the meta device.

    Attributes:
        model: With few layers or all.
        num_layers: Layers of the whole model.
        period: Layers after which kinds recur; 0 where the model is whole.
        load_dtype: Dtype of its weights before they are packed or cast.
        counts: Parameters of the whole model, those that train, and the elements of each of these.
    """

    model: nn.Module
    num_layers: int
    period: int
    load_dtype: torch.dtype
    counts: tuple[int, int, tuple[int, ...]] = (0, 0, ())


@dataclass(frozen=True)
class TracedRun:
    """A run's trace, whole.

    Attributes:
        life: All layers unrolled.
        num_parameters, num_trainable: Parameters.
        trainable_elements: Elements of each trainable parameter.
        num_layers: Layers of the model.
        period: Layers after which kinds recur, so that ``life.tape`` can be unrolled again; 0 where it is whole.
        memories: Memory estimates made of it, by what else decides them.
    """

    life: Life
    num_parameters: int
    num_trainable: int
    trainable_elements: tuple[int, ...]
    num_layers: int = 0
    period: int = 0
    memories: dict[Any, MemoryEstimate] = field(default_factory=dict, compare=False, repr=False)


_MODELS: OrderedDict[str, _Built] = OrderedDict()
_PERIODS: OrderedDict[str, int | None] = OrderedDict()
_LIVES: OrderedDict[str, TracedRun] = OrderedDict()
_CACHE = threading.Lock()


# From this many times the time of float32 on, a CPU is said to emulate bfloat16.
SLOW_BFLOAT16 = 1.5


def estimate_run(
    recipe: Recipe,
    device: Device | None = None,
    *,
    shape: BatchShape | None = None,
    script: Script = OUR_TRAINER,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> Estimate:
    """Predict memory and step time of a run without running it.

    Args:
        recipe: The settings.
        device: The target; None takes the Recipe's.
        shape: Batches, from ``shape_of_data``; None assumes that every sample fills ``max_length``.
        script: What another training script than ours does otherwise.
        progress: Told about the stage ``"trace"``.
        cancel: Looked at in every operator of the trace.

    Returns:
        The estimate.

    Raises:
        RecipeError: Settings contradict each other or the device.
        ModelError: The model is unknown or cannot be built.
        EstimateError: The run cannot be traced.
        Cancelled: The user cancelled.

    Example:
        >>> from workbench import Recipe, estimate_run, find_device
        >>> estimate = estimate_run(Recipe(), find_device("Tesla T4"))
        >>> estimate.memory.verdict
        'fits'
    """
    if len(recipe.phases.steps) > 1:
        require_valid(recipe, (device or target_device(recipe)).facts(for_estimate=True))
        options: Any = {"shape": shape, "script": script, "progress": progress, "cancel": cancel}
        return estimate_phases(recipe, lambda phase: estimate_run(phase, device, **options))
    began = time.perf_counter()
    target = device or target_device(recipe)
    require_valid(recipe, target.facts(for_estimate=True))
    batch = shape or full_shape(recipe)
    process_base_bytes()
    if target.has_caching_allocator:
        start_compiling()
    notes: list[str] = []
    traceable = as_traceable(recipe, batch, notes)
    traced, was_cached = traced_run(traceable, target, batch, script, progress, cancel)
    memory = _memory(recipe, target, traced, script, extra_uncertainty=0.1 if len(notes) else 0.0)
    notes += _assumptions(recipe, target, batch)
    slower = 1.0 if target.has_caching_allocator else slowdown(target, traced.life.tape.work)
    if slower > SLOW_BFLOAT16:
        notes.append(
            f"Products in bfloat16 take {slower:.0f} times as long as in float32 on this CPU (measured). "
            "Set training.mixed_precision=no and model.dtype=float32."
        )
    step_time = estimate_time(recipe, target, traced.life, batch)
    if recipe.sharding.num_processes > 1:
        from .sharding import estimate_layout  # it asks this file for traces
        from .spread_time import spread_time

        row = estimate_layout(traceable, target, batch, cancel)
        memory, step_time = row.memory or memory, spread_time(step_time, row, recipe, batch)
        notes.append(f"Spread as {row.layout.name}: memory is that of {row.rank}, the step that of all together.")
    return Estimate(
        recipe_digest=recipe.digest(),
        device_name=target.name,
        num_parameters=traced.num_parameters,
        num_trainable_parameters=traced.num_trainable,
        shape=batch,
        memory=memory,
        time=step_time,
        notes=notes,
        elapsed_s=time.perf_counter() - began,
        was_cached=was_cached,
    )


def _memory(
    recipe: Recipe, device: Device, traced: TracedRun, script: Script, *, extra_uncertainty: float
) -> MemoryEstimate:
    """Return the memory of a traced run; events are not replayed again where nothing that the replay reads changed."""
    version = recipe.hardware.torch_version or torch.__version__
    num_micro_batches = min(recipe.training.gradient_accumulation_steps, MAX_MICRO_BATCHES)
    expandable = recipe.hardware.expandable_segments
    host_bytes = _host_bytes(recipe, traced) if device.has_caching_allocator else 0
    key = (num_micro_batches, repr(device), version, expandable, host_bytes, repr(script), extra_uncertainty)
    with _CACHE:
        found = traced.memories.get(key)
    if found is None:
        found = estimate_memory(
            line_up(traced.life, num_micro_batches, script=script),
            device,
            torch_version=version,
            expandable_segments=expandable,
            host_bytes=host_bytes,
            extra_uncertainty=extra_uncertainty,
        )
        with _CACHE:
            if len(traced.memories) >= MAX_MEMORIES:
                traced.memories.clear()
            traced.memories[key] = found
    return found


def _host_bytes(recipe: Recipe, traced: TracedRun) -> int:
    """Return the bytes that live in host memory beside the device's: paged optimizer state, moved activations."""
    life = traced.life
    begin, end = life.tape.work_segments()["first"]
    backward = life.tape.phase_names.index("backward")
    moved = sum(
        work.num_bytes * int(weight)
        for work, weight in zip(life.tape.work[begin:end], life.weights[begin:end], strict=True)
        if work.operator == HOST_COPY and work.phase < backward
    )
    return paged_host_bytes(recipe, list(traced.trainable_elements)) + moved


def clear_caches() -> None:
    """Forget all models and traces, so that the next estimate starts cold."""
    with _CACHE:
        _MODELS.clear()
        _LIVES.clear()
        _PERIODS.clear()


def as_traceable(recipe: Recipe, batch: BatchShape, notes: list[str]) -> Recipe:
    """Return the Recipe with what cannot be built without its package replaced by what behaves alike."""
    recipe = starting_recipe(recipe)
    if recipe.training.torch_compile:
        notes.append("torch.compile is not modelled: memory and time are those of the eager run, memory less sure.")
    return recipe


def _assumptions(recipe: Recipe, device: Device, batch: BatchShape) -> list[str]:
    notes = start_notes(recipe)
    if batch.source == "max_length":
        notes.append(
            f"Every sample is taken to fill max_length ({batch.length} tokens); with the data set it is exact."
        )
    if device.has_caching_allocator and device.compute_capability is None:
        notes.append("Kernels of this device are taken to behave as those of an NVIDIA GPU.")
    if recipe.quantization.load_in_8bit and device.has_caching_allocator:
        notes.append("8-bit outlier columns depend on the weights; 0.1 % of the columns are assumed.")
    return notes


def _trace_shape(recipe: Recipe, batch: BatchShape) -> TraceShape:
    evaluates = recipe.evaluation.split != "none"
    return TraceShape(
        batch_size=batch.batch_size,
        length=batch.length,
        eval_batch_size=recipe.evaluation.per_device_eval_batch_size if evaluates else 0,
        padded=batch.padded,
        packed=recipe.data.packing,
        real_share=_real_share(recipe, batch),
    )


def _real_share(recipe: Recipe, batch: BatchShape) -> float:
    """Return the share of the fullest batch that is no padding, where a kernel makes use of it."""
    known = batch.max_real_tokens if recipe.model.attn_implementation == "flash_attention_2" and batch.padded else None
    return 1.0 if known is None else min(1.0, known / (batch.batch_size * batch.length))


def traced_run(
    recipe: Recipe,
    device: Device,
    batch: BatchShape,
    script: Script,
    progress: ProgressCallback | None,
    cancel: Cancel | None,
) -> tuple[TracedRun, bool]:
    shape = _trace_shape(recipe, batch)
    accumulates = recipe.training.gradient_accumulation_steps > 1
    key = f"{cache_key(recipe, device, for_model=False)} {shape} {accumulates} {script.name}"
    with _CACHE:
        found = _LIVES.get(key)
        if found is not None:
            _LIVES.move_to_end(key)
            return found, True
    path = trace_path(recipe, key) if script is OUR_TRAINER else None
    stored = None if path is None else load_trace(path)
    if stored is not None:
        traced = _unpacked(stored)
        _keep(key, traced)
        return traced, True
    if progress is not None:
        progress(Progress("trace", 0, 1, f"Tracing {recipe.model.name_or_path}"))
    with exclusive(cancel), collection_paused():
        try:
            traced = _trace(recipe, device, shape, script, cancel)
        except (WorkbenchError, MemoryError):
            raise
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            raise EstimateError(
                f"{recipe.model.name_or_path} cannot be traced ({type(error).__name__}: {first_line}). "
                "Try model.attn_implementation=eager, or another model."
            ) from error
    _keep(key, traced)
    if path is not None:
        save_trace(path, _packed(traced))
    if progress is not None:
        progress(Progress("trace", 1, 1, f"Traced {recipe.model.name_or_path}"))
    return traced, False


def _keep(key: str, traced: TracedRun) -> None:
    with _CACHE:
        _LIVES[key] = traced
        while len(_LIVES) > MAX_LIVES:
            _LIVES.popitem(last=False)


def _packed(traced: TracedRun) -> StoredTrace:
    counts = (traced.num_parameters, traced.num_trainable, traced.trainable_elements)
    return StoredTrace(traced.life.tape, counts, traced.num_layers, traced.period)


def _unpacked(stored: StoredTrace) -> TracedRun:
    tape, num_layers, period = stored.tape, stored.num_layers, stored.period
    life = unroll(tape, num_layers, period) if period else whole(tape)
    return TracedRun(life, *stored.counts, num_layers, period)


def _trace(recipe: Recipe, device: Device, shape: TraceShape, script: Script, cancel: Cancel | None) -> TracedRun:
    source = find_source(recipe, for_training=False, cancel=cancel)
    built = _built(recipe, source, device, script, cancel, is_whole=False)
    few = traced_layers(built.num_layers, built.period) if built.period else 0
    trace = trace_run(
        recipe, built.model, device, shape, load_dtype=built.load_dtype, cancel=cancel, script=script,
        repeats=(few, built.period) if built.period else None,
    )  # fmt: skip
    if built.period:
        try:
            life = unroll(trace.tape, built.num_layers, built.period)
        except NotUniformError:
            built = _built(recipe, source, device, script, cancel, is_whole=True)
            trace = trace_run(
                recipe, built.model, device, shape, load_dtype=built.load_dtype, cancel=cancel, script=script
            )
            life = whole(trace.tape)
    else:
        life = whole(trace.tape)
    return TracedRun(life, *built.counts, built.num_layers, built.period)


def _count(built: _Built) -> tuple[int, int, tuple[int, ...]]:
    """Count parameters of the whole model from those of the traced one: all, trainable, elements of each of these."""
    total, trainable = count_parameters(built.model)
    elements = [parameter.numel() for parameter in built.model.parameters() if parameter.requires_grad]
    if built.period:
        few = traced_layers(built.num_layers, built.period)
        path = next(name for name, length in layer_lists(built.model).items() if length == few)
        layers = built.model.get_submodule(path)
        copies = built.num_layers // built.period - TRACED_LAYERS
        for index in range(built.period, 2 * built.period):  # the template
            layer = layers[index]  # type: ignore[index]  # a ModuleList
            layer_total, layer_trainable = count_parameters(layer)
            total += copies * layer_total
            trainable += copies * layer_trainable
            elements += copies * [parameter.numel() for parameter in layer.parameters() if parameter.requires_grad]
    return total, trainable, tuple(elements)


def _built(
    recipe: Recipe, source: ModelSource, device: Device, script: Script, cancel: Cancel | None, *, is_whole: bool
) -> _Built:
    key = f"{cache_key(recipe, device, for_model=True)} {is_whole} {script.name if script.adapt else ''}"
    found = _MODELS.get(key)
    if found is not None:
        _MODELS.move_to_end(key)
        return found
    count = int(getattr(source.config.get_text_config(), "num_hidden_layers", 0) or 0)
    period = 0 if is_whole else _period(recipe, source, device, count, cancel)
    few = traced_layers(count, period) if period and count > traced_layers(count, period) else None
    model = build_model(recipe, source, device, place="meta", num_hidden_layers=few, cancel=cancel)
    if few and few not in layer_lists(model).values():
        # The setting that shortens it belongs to another part: the encoder of a model whose decoder is trained alone.
        few, model = None, build_model(recipe, source, device, place="meta", cancel=cancel)
    PhaseSwitch(recipe, model).apply(0)
    load_dtype = load_weight_dtype(recipe, source, device)
    add_quant_states(model, recipe, load_dtype)
    if script.adapt is not None:
        model = script.adapt(model)
    built = _Built(model, count, period if few else 0, load_dtype)
    built.counts = _count(built)
    _MODELS[key] = built
    while len(_MODELS) > MAX_MODELS:
        _MODELS.popitem(last=False)
    return built


def _period(recipe: Recipe, source: ModelSource, device: Device, count: int, cancel: Cancel | None) -> int:
    """Return the period of the model's layers, 0 where it has to be traced whole."""
    if has_layer_settings(recipe) or count <= TRACED_LAYERS:
        return 0
    key = f"{recipe.model.task} {json.dumps(source.config.to_dict(), sort_keys=True, default=str)}"
    if key not in _PERIODS:
        plain = Recipe().with_changes(
            {
                "model.name_or_path": recipe.model.name_or_path,
                "model.task": recipe.model.task,
                "model.config": recipe.model.config,
                "model.trust_remote_code": recipe.model.trust_remote_code,
                "adapter.method": "none",
            }
        )
        model = build_model(plain, source, device, place="meta", cancel=cancel)
        _PERIODS[key] = layer_period(model, source.config.get_text_config())
        while len(_PERIODS) > MAX_LIVES:
            _PERIODS.popitem(last=False)
    # Every n-th layer checkpointed: kinds recur where both patterns do.
    return math.lcm(_PERIODS[key] or 0, recipe.training.gradient_checkpointing_every)
