"""estimate_layouts: what each way of spreading a run over several devices takes, rank by rank."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from ..components.precision import resolve_precision
from ..components.source import find_source
from ..errors import EstimateError, ModelError
from ..events import Cancel, Progress, ProgressCallback
from ..hardware import Device, target_device
from ..recipe import Recipe, find_problems, require_valid
from ..units import MIB
from .assemble import line_up
from .estimate import BatchShape, MemoryEstimate
from .layout import Layout, LayoutEstimate, LayoutTable
from .memory import estimate_memory
from .network import Network, network_of
from .optimizers import paged_host_bytes
from .run import TracedRun, traced_run
from .script import OUR_TRAINER, Script
from .shape import full_shape
from .sharded_tape import Cut, parameter_tokens, shard_tape
from .stages import only_layers, stage_life
from .tape import NO_LAYER, Tape
from .tensor_parallel import refuse_split, split_head, split_recipe
from .time import estimate_time
from .traffic import Load, groups_of, traffic_of
from .unroll import TRACED_LAYERS, Life, NotUniformError, unroll, whole

# What NCCL takes outside torch's allocator for one communicator: of 2 ranks, and of more.
# Source: readings on 4 A100, NVIDIA/nccl#964.
NCCL_PAIR_BYTES, NCCL_GROUP_BYTES = 544 * MIB, 688 * MIB
# Buffers of other streams lie in pools of their own, whose holes the replay of one stream does not see.
_MANY_STREAMS = 0.05
_TENSOR_SIZES = (2, 4, 8)
_STAGES = (2, 4, 8, 16)


def estimate_layouts(
    recipe: Recipe,
    device: Device | None = None,
    *,
    num_devices: int | None = None,
    layouts: list[Layout] | None = None,
    shape: BatchShape | None = None,
    script: Script = OUR_TRAINER,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> LayoutTable:
    """Estimate memory, traffic and step time of each layout of the same work on the same devices.

    Every layout sees the samples per optimizer step that DDP with the Recipe's batch and accumulation would see; fewer
    data-parallel ranks accumulate more.

    Args:
        recipe: The settings; ``sharding`` names the network and the number of machines.
        device: Each of the devices; None takes the Recipe's target.
        num_devices: How many; None takes ``sharding.num_processes``.
        layouts: The layouts; None takes all that divide the devices.
        shape: Batches of one rank, from ``shape_of_data``.
        script: What another training script than ours does otherwise.
        progress: Told about the stage ``"plan"``.
        cancel: Looked at between layouts and inside traces.

    Raises:
        RecipeError: The recipe itself is wrong.
        ModelError: The model is unknown.
        Cancelled: The user cancelled.

    Example:
        >>> from workbench import Recipe, estimate_layouts, find_device
        >>> table = estimate_layouts(Recipe(), find_device("A100-SXM4-80GB"), num_devices=8)
        >>> table.best.layout.name
        'DDP x8'
    """
    target = device or target_device(recipe)
    count = num_devices or recipe.sharding.num_processes
    machines = recipe.sharding.num_machines if count % recipe.sharding.num_machines == 0 else 1
    plain = recipe.with_changes(
        {
            **Layout("ddp", count, shard_size=1).changes,
            "sharding.num_machines": machines,
        }
    )
    require_valid(plain, target.facts(for_estimate=True))
    network = network_of(plain, target)
    spread = _Spread(plain, target, network, shape or full_shape(plain), cancel)
    spread.script = script
    wanted = layouts or list_layouts(count, network.devices_per_machine)
    rows = []
    for index, layout in enumerate(wanted):
        if progress is not None:
            progress(Progress("plan", index, len(wanted), layout.name))
        if cancel is not None:
            cancel.check()
        rows.append(spread.estimate(layout))
    rows.sort(key=lambda row: (bool(row.refused), _rank_of(row), -row.tokens_per_s))
    return LayoutTable(
        device_name=target.name,
        network_name=network.name,
        num_devices=count,
        samples_per_step=spread.samples,
        rows=tuple(rows),
        notes=_notes(network, target),
    )


def estimate_layout(
    recipe: Recipe, device: Device, shape: BatchShape | None = None, cancel: Cancel | None = None
) -> LayoutEstimate:
    """Estimate the layout that the Recipe's ``sharding`` asks for.

    Raises:
        EstimateError: The layout cannot be used for this model; the message says why.
    """
    layout = layout_of(recipe)
    network = network_of(recipe, device)
    spread = _Spread(recipe, device, network, shape or full_shape(recipe), cancel)
    spread.samples = layout.data_parallel * spread.per_rank
    row = spread.estimate(layout)
    if row.refused:
        raise EstimateError(f"{layout.name} cannot be used here: {row.refused}. Set sharding.layout=ddp.")
    return row


def layout_of(recipe: Recipe) -> Layout:
    """Return the layout that a Recipe's ``sharding`` asks for."""
    sharding = recipe.sharding
    tensor, stages = sharding.tensor_parallel_size, sharding.pipeline_parallel_size
    data = max(1, sharding.num_processes // (tensor * stages))
    return Layout(sharding.layout, data, tensor, stages, _shard_size(sharding.layout, data, sharding.num_machines))


def _shard_size(kind: str, data: int, num_machines: int) -> int:
    if kind == "ddp":
        return 1
    return data // num_machines if kind == "hybrid" and data % num_machines == 0 else data


def list_layouts(num_devices: int, devices_per_machine: int) -> list[Layout]:
    """Return the layouts worth comparing on so many devices."""
    if num_devices == 1:
        return [Layout("ddp", 1)]
    found = [
        Layout(kind, num_devices, shard_size=1 if kind == "ddp" else num_devices)
        for kind in ("ddp", "zero1", "zero2", "zero3", "fsdp")
    ]
    if devices_per_machine < num_devices:
        found.append(Layout("hybrid", num_devices, shard_size=devices_per_machine))
    for tensor in _TENSOR_SIZES:
        if num_devices % tensor == 0 and tensor <= devices_per_machine:
            data = num_devices // tensor
            found += [Layout("ddp", data, tensor)]
            found += [Layout("fsdp", data, tensor, shard_size=data)] if data > 1 else []
    found += [Layout("ddp", num_devices // stages, 1, stages) for stages in _STAGES if num_devices % stages == 0]
    for tensor in _TENSOR_SIZES:
        for stages in _STAGES:
            data, rest = divmod(num_devices, tensor * stages)
            if not rest and data and tensor <= devices_per_machine and num_devices >= 8:
                found.append(Layout("zero1" if data > 1 else "ddp", data, tensor, stages, data))
    return found


def _rank_of(row: LayoutEstimate) -> int:
    return ("fits", "tight", "does_not_fit").index(row.verdict)


def _notes(network: Network, device: Device) -> tuple[str, ...]:
    notes = [
        f"Links reach {network.efficiency:.0%} of their nominal rate: {network.device_bytes_per_s / 1e9:.0f} GB/s for "
        f"a device in its machine, {network.machine_bytes_per_s * 8 / 1e9:.0f} Gbit/s for a whole machine to others.",
        "Overlap is the engine's best case: computation hides communication, but for one bucket or gather.",
    ]
    if not device.has_caching_allocator:
        notes.append("Wires between CPUs are taken to be those of the named network.")
    return tuple(notes)


@dataclass(frozen=True)
class _Rank:
    """One kind of rank: its life, and what it is called."""

    name: str
    life: Life


class _Spread:
    """Estimates layouts of one recipe on one kind of device; traces are shared."""

    def __init__(
        self, recipe: Recipe, device: Device, network: Network, shape: BatchShape, cancel: Cancel | None
    ) -> None:
        self.recipe, self.device, self.network, self.shape, self.cancel = recipe, device, network, shape, cancel
        self.config = find_source(recipe, for_training=False, cancel=cancel).config
        training = recipe.training
        self.per_rank = shape.batch_size * training.gradient_accumulation_steps
        self.samples = self.per_rank * recipe.sharding.num_processes
        self._alone_s: float | None = None
        self.script = OUR_TRAINER

    def estimate(self, layout: Layout) -> LayoutEstimate:
        """Return the estimate of one layout, or why it is refused."""
        refused = self._refuse(layout)
        if refused:
            return LayoutEstimate(layout, refused=refused)
        accumulation = max(1, round(self.samples / (self.shape.batch_size * layout.data_parallel)))
        recipe = self.recipe.with_changes({"training.gradient_accumulation_steps": accumulation})
        try:
            traced = self._traced(recipe, layout.tensor_parallel)
            ranks = self._ranks(traced, layout, accumulation)
        except (EstimateError, ModelError, NotUniformError) as error:
            return LayoutEstimate(layout, refused=str(error).rstrip("."))
        name, memory = max(
            ((rank.name, self._memory(recipe, layout, rank.life, traced)) for rank in ranks),
            key=lambda item: item[1].process_bytes,
        )
        return self._timed(recipe, layout, accumulation, traced, (name, memory))

    def _refuse(self, layout: Layout) -> str:
        changed = self.recipe.with_changes(layout.changes)
        problems = find_problems(changed, self.device.facts(for_estimate=True))
        if problems:
            return problems[0].message.rstrip(".")
        if layout.tensor_parallel > 1:
            return refuse_split(self.recipe, self.config, layout.tensor_parallel)
        return ""

    def _traced(self, recipe: Recipe, tensor_parallel: int) -> TracedRun:
        if tensor_parallel > 1:
            recipe = split_recipe(recipe, self.config, tensor_parallel)
        traced, _ = traced_run(recipe, self.device, self.shape, self.script, None, self.cancel)
        if tensor_parallel == 1 or self.config.get_text_config().tie_word_embeddings:
            return traced
        tape = split_head(traced.life.tape, tensor_parallel)
        return dataclasses.replace(traced, life=_unrolled(tape, traced, traced.num_layers))

    def _ranks(self, traced: TracedRun, layout: Layout, accumulation: int) -> list[_Rank]:
        """Return the kinds of ranks: one, or the first, middle and last stage."""
        tape = traced.life.tape
        if layout.data_parallel > 1:
            engine = "deepspeed" if layout.kind.startswith("zero") else layout.kind.replace("hybrid", "fsdp")
            copies = traced.num_layers // traced.period - TRACED_LAYERS if traced.period else 0
            copies = max(0, copies // layout.pipeline_parallel)
            tape = shard_tape(tape, Cut(layout.shard_size, layout.cuts, engine), copies, traced.period or 1)
        stages = layout.pipeline_parallel
        if stages == 1:
            return [_Rank("every rank", _unrolled(tape, traced, traced.num_layers))]
        layers = _layers_of_stage(traced, stages)
        life = _cut_to(tape, traced, layers)
        is_tied = bool(self.config.get_text_config().tie_word_embeddings)
        found = []
        for index in sorted({0, 1, stages - 1} & set(range(stages))):
            name = "first stage" if index == 0 else "last stage" if index == stages - 1 else "second stage"
            stage = stage_life(
                life,
                is_first=index == 0,
                is_last=index == stages - 1,
                in_flight=min(stages - index, accumulation),
                is_tied=is_tied,
            )
            found.append(_Rank(name, stage))
        return found

    def _memory(self, recipe: Recipe, layout: Layout, life: Life, traced: TracedRun) -> MemoryEstimate:
        device = self.device
        on_gpu = device.has_caching_allocator
        if on_gpu:
            device = dataclasses.replace(device, context_bytes=device.context_bytes + nccl_bytes(layout))
        schedule = line_up(life, recipe.training.gradient_accumulation_steps, script=self.script)
        return estimate_memory(
            schedule,
            device,
            torch_version=recipe.hardware.torch_version or torch.__version__,
            expandable_segments=recipe.hardware.expandable_segments,
            host_bytes=paged_host_bytes(recipe, list(traced.trainable_elements)) if on_gpu else 0,
            extra_uncertainty=_MANY_STREAMS if layout.num_devices > 1 else 0.0,
        )

    def _timed(
        self,
        recipe: Recipe,
        layout: Layout,
        accumulation: int,
        traced: TracedRun,
        heaviest: tuple[str, MemoryEstimate],
    ) -> LayoutEstimate:
        load = self._load(recipe, layout, accumulation, traced)
        traffic = traffic_of(layout, load, self.network)
        optimizer_s = load.optimizer_s / (layout.shard_size if "state" in layout.cuts else 1)
        compute_s = load.micro_s * accumulation + optimizer_s
        bubble_s = (layout.pipeline_parallel - 1) * load.micro_s
        step_s = compute_s + bubble_s + sum(item.seconds for item in traffic)
        overlapped_s = step_s - sum(item.hidden_s for item in traffic)
        samples = accumulation * self.shape.batch_size * layout.data_parallel
        tokens_per_s = samples * self.shape.mean_real_tokens / overlapped_s
        return LayoutEstimate(
            layout=layout,
            accumulation=accumulation,
            memory=heaviest[1],
            rank=heaviest[0],
            traffic=tuple(traffic),
            compute_s=compute_s,
            bubble_s=bubble_s,
            step_s=step_s,
            overlapped_s=overlapped_s,
            tokens_per_s=tokens_per_s,
            efficiency=tokens_per_s / (layout.num_devices * self._alone_tokens_per_s()),
        )

    def _alone_tokens_per_s(self) -> float:
        """Return the tokens per second of one device by itself, whether the run fits there or not."""
        if self._alone_s is None:
            traced = self._traced(self.recipe, 1)
            self._alone_s = estimate_time(self.recipe, self.device, traced.life, self.shape).tokens_per_s
        return self._alone_s

    def _load(self, recipe: Recipe, layout: Layout, accumulation: int, traced: TracedRun) -> Load:
        life, layers = traced.life, traced.num_layers
        if layout.pipeline_parallel > 1:
            layers = _layers_of_stage(traced, layout.pipeline_parallel)
            life = _cut_to(life.tape, traced, layers)
        # The slowest stage decides, and it has the head: its whole work is counted.
        seconds = estimate_time(recipe, self.device, life, self.shape).seconds_by_class
        optimizer_s = seconds.get("optimizer", 0.0)
        weights, root = _weights(life)
        text = self.config.get_text_config()
        itemsize = self._activation_itemsize(recipe)
        tokens = self.shape.batch_size * self.shape.mean_length
        is_gathered = layout.tensor_parallel > 1 and not text.tie_word_embeddings
        return Load(
            weight_bytes=weights,
            root_bytes=root,
            gradient_bytes=_gradients(life),
            activation_bytes=tokens * text.hidden_size * itemsize,
            logit_bytes=tokens * text.vocab_size * itemsize if is_gathered else 0.0,
            num_layers=layers,
            recomputes=recipe.training.gradient_checkpointing,
            micro_s=(sum(seconds.values()) - optimizer_s) / accumulation,
            optimizer_s=optimizer_s,
            accumulation=accumulation,
            bucket_bytes=recipe.sharding.bucket_cap_mb * MIB,
        )

    def _activation_itemsize(self, recipe: Recipe) -> int:
        dtype = resolve_precision(recipe, self.device).autocast_dtype
        return dtype.itemsize if dtype is not None else 4


def nccl_bytes(layout: Layout) -> int:
    """Return what NCCL's communicators take on a device beside torch's memory, in bytes."""
    groups = groups_of(layout, layout.num_devices)
    sizes = [groups.data.size, groups.tensor.size, groups.stage.size]
    if layout.kind == "hybrid":
        sizes[0:1] = [groups.shard.size, groups.replicate.size]
    return sum(NCCL_PAIR_BYTES if size == 2 else NCCL_GROUP_BYTES for size in sizes if size > 1)


def _layers_of_stage(traced: TracedRun, stages: int) -> int:
    layers, period = math.ceil(traced.num_layers / stages), max(1, traced.period)
    layers = math.ceil(layers / period) * period
    if layers < TRACED_LAYERS * period or layers * (stages - 1) >= traced.num_layers:
        raise EstimateError(f"{traced.num_layers} layers cannot be cut into {stages} stages of 3 layers or more.")
    return layers


def _cut_to(tape: Tape, traced: TracedRun, num_layers: int) -> Life:
    """Return the life of so many layers: the ones from the second on where the trace has them all."""
    if traced.period:
        return _unrolled(tape, traced, num_layers)
    first = 1 if num_layers < traced.num_layers else 0
    return only_layers(whole(tape), range(first, first + num_layers))


def _unrolled(tape: Tape, traced: TracedRun, num_layers: int) -> Life:
    if not traced.period:
        return whole(tape)
    # What is left over after the last whole period is in the tape already.
    return unroll(tape, num_layers, traced.period)


def _weights(life: Life) -> tuple[int, int]:
    """Return the bytes of all weights and of those outside the layers."""
    known = set(parameter_tokens(life.tape))
    tape = life.tape
    begin, _ = life.starts["first"]
    total = root = 0
    for token in life.events[:begin].tolist():
        source: Any = int(life.sources[token]) if token >= 0 else None
        if source in known:
            total += int(life.sizes[token])
            root += int(life.sizes[token]) if tape.layers[source] == NO_LAYER else 0
    return total, root


def _gradients(life: Life) -> int:
    begin, end = life.starts["first"]
    names = life.tape.categories
    return sum(
        int(life.sizes[token])
        for token in life.events[begin:end].tolist()
        if token >= 0 and names.get(int(life.sources[token])) == "gradient"
    )
