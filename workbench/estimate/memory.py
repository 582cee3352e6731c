"""From events to a MemoryEstimate: allocator replay, peak, holders, timeline, interval and verdict."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..events import MEMORY_CATEGORIES, Timeline
from ..hardware import Device
from ..units import MIB
from .allocator import CachingAllocator, OutOfCapacity, workspace_bytes
from .assemble import Schedule, Stretch
from .estimate import MemoryEstimate, PeakHolder, Verdict
from .fragmentation import find_fragmentation
from .loading import WEIGHT

# Points of a timeline that is handed out; each keeps the highest instant of its stretch.
TIMELINE_POINTS = 1200
MAX_HOLDERS = 40
# Half-widths of the interval, each for one cause.
# The context depends on driver, loaded kernels and libraries: 141 MiB were measured on a T4 where the table's model
# says 290, and 1.4 GB is charged by others.
CONTEXT_LOW, CONTEXT_HIGH = 0.6, 1.0
# Segments a real run splits otherwise than the replay: share of what is reserved and not parameters.
FRAGMENTATION = 0.05
# Room a replay at the capacity gets before the run is said not to fit: two finished runs of 69 GiB allocated on 79 GiB
# would otherwise be refused for the holes between their logits.
HOLES = 0.1
# Memory that kernels take inside themselves and that no operator shows: share of activations and temporaries.
UNSEEN_KERNELS = 0.02
# Operators that run in cuBLAS; the others of a trace never take its workspace.
PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "gemm_4bit", "int8_scaled_mm", "int8_mixed_scaled_mm"))
# What warming the allocator up leaves of a device. Source: caching_allocator_warmup, transformers/modeling_utils.py.
WARM_UP_SPARE = int(1.2 * 1024 * MIB)
# glibc keeps freed memory of the CPU's kernels and threads.
CPU_OVERHEAD = 0.10


@dataclass(frozen=True)
class Replay:
    """Bytes after every event.

    Attributes:
        allocated, reserved: int64 arrays.
        workspace: Bytes of cuBLAS's workspaces, included in both.
        workspace_from: First event at which they exist.
        allocator: The allocator after the last event that ran; None on a CPU.
    """

    allocated: Any
    reserved: Any
    workspace: int
    workspace_from: int
    allocator: CachingAllocator | None = None


def estimate_memory(
    schedule: Schedule,
    device: Device,
    *,
    torch_version: str,
    expandable_segments: bool = False,
    host_bytes: int = 0,
    extra_uncertainty: float = 0.0,
) -> MemoryEstimate:
    """Return the predicted memory of a run.

    Args:
        schedule: Its events.
        device: The target.
        torch_version: Decides workspace sizes.
        expandable_segments: Allocator setting.
        host_bytes: Host memory beside the device's.
        extra_uncertainty: Share added to the interval's upper end, for what is not modelled.
    """
    replay = replay_schedule(schedule, device, torch_version, expandable_segments)
    peak = int(np.argmax(replay.allocated))
    peak_allocated, peak_reserved = int(replay.allocated[peak]), int(replay.reserved.max())
    base = device.context_bytes if device.has_caching_allocator else process_base_bytes()
    process = peak_reserved + base
    alive = alive_at(schedule, peak)
    breakdown = _breakdown(schedule, alive, replay, peak, process, base)
    low, high = _interval(device, breakdown, peak_allocated, peak_reserved, base, extra_uncertainty)
    stretch = next(item for item in schedule.stretches if item.begin <= peak < item.end)
    unused = find_fragmentation(schedule, replay.allocated, replay.reserved)
    return MemoryEstimate(
        peak_allocated_bytes=peak_allocated,
        peak_reserved_bytes=peak_reserved,
        process_bytes=process,
        capacity_bytes=device.capacity_bytes,
        interval_bytes=(low, high),
        verdict=_verdict(schedule, device, torch_version, expandable_segments, process, low, high),
        breakdown=breakdown,
        peak_phase=schedule.life.tape.phase_names[int(schedule.phases[peak])],
        peak_step=stretch.step,
        rest_bytes=_rest(schedule, replay),
        host_bytes=host_bytes,
        peak_by_phase=_peak_by_phase(schedule, replay),
        holders=holders_of(schedule, alive),
        timeline=_timeline(schedule, replay, peak),
        fragmentation_bytes=unused.num_bytes,
        fragmentation_cause=unused.cause,
    )


@functools.cache
def process_base_bytes() -> int:
    """Return the resident memory of a process with the libraries loaded and no model; measured once, in this one."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def replay_schedule(
    schedule: Schedule,
    device: Device,
    torch_version: str,
    expandable: bool,
    capacity: int | None = None,
    stop: int | None = None,
) -> Replay:
    """Run all events, or those before ``stop``; what did not run stays 0.

    Raises:
        OutOfCapacity: ``capacity`` was given and does not suffice.
    """
    sizes = schedule.sizes
    events = schedule.events
    if not device.has_caching_allocator:
        signs = np.where(events >= 0, 1, -1)
        allocated = np.cumsum(signs * sizes[np.where(events >= 0, events, ~events)])
        return Replay(allocated, allocated, 0, 0)
    allocator = CachingAllocator(capacity, expandable_segments=expandable)
    rows = np.zeros(len(sizes), dtype=np.int64)
    allocated = np.zeros(len(events), dtype=np.int64)
    reserved = np.zeros(len(events), dtype=np.int64)
    forward, backward = workspace_bytes(device.compute_capability, torch_version)
    forward_at, backward_at = _first_products(schedule)
    cuts: list[tuple[int, Callable[[], object]]] = [
        (0, lambda: _warm_up(allocator, schedule, device)),
        (_stretch(schedule, "adapter").begin, lambda: _empty_cache(allocator, schedule)),
        (forward_at, lambda: allocator.malloc(forward)),
        (backward_at, lambda: allocator.malloc(backward)),
    ]
    end = len(events) if stop is None else stop
    done = 0
    for position, act in sorted(cuts, key=lambda cut: cut[0]):
        if position < end:
            allocator.run_events(events[:position], sizes, rows, allocated, reserved, done)
            done = position
            act()
    allocator.run_events(events[:end], sizes, rows, allocated, reserved, done)
    return Replay(allocated, reserved, forward + backward, backward_at, allocator)


def smallest_capacity(
    schedule: Schedule, device: Device, *, torch_version: str, expandable_segments: bool = False
) -> int:
    """Return the least memory of a card, context included, on which the run survives.

    Below the reserved peak the allocator gives cached segments back and tries again, which costs time; what is
    allocated at the peak is the floor. Found by halving, to 2 MiB, the unit in which segments grow.

    Raises:
        ValueError: The device has no caching allocator, so that nothing is given back.
    """
    if not device.has_caching_allocator:
        raise ValueError(f"{device.name} has no caching allocator; its smallest capacity is the estimate itself.")
    free = replay_schedule(schedule, device, torch_version, expandable_segments)
    fails, survives = int(free.allocated.max()) - 1, int(free.reserved.max())
    while survives - fails > 2 * MIB:
        middle = (fails + survives) // 2
        try:
            replay_schedule(schedule, device, torch_version, expandable_segments, middle)
            survives = middle
        except OutOfCapacity:
            fails = middle
    return survives + device.context_bytes


def _stretch(schedule: Schedule, name: str) -> Stretch:
    """Return the first stretch of this name."""
    return next(item for item in schedule.stretches if item.name == name)


def _warm_up(allocator: CachingAllocator, schedule: Schedule, device: Device) -> None:
    """Take all weights in one block and free it, so that they are cut from one segment.

    The block holds what the weights take once they are packed, without their scales.

    Source:
        ``caching_allocator_warmup`` and ``get_total_byte_count``, transformers/modeling_utils.py.
    """
    tape = schedule.life.tape
    if not schedule.script.warms_up or WEIGHT not in tape.operator_names:
        return
    stretch = _stretch(schedule, "load")
    events = schedule.events[stretch.begin : stretch.end]
    born = events[events >= 0]
    operators = np.array(tape.operators)[schedule.life.sources[schedule.sources[born]]]
    weights = int(schedule.sizes[born][operators == tape.operator_names.index(WEIGHT)].sum())
    weights = min(weights, device.capacity_bytes - WARM_UP_SPARE)
    if weights > 0:
        allocator.free(allocator.malloc(weights))


def _empty_cache(allocator: CachingAllocator, schedule: Schedule) -> None:
    """``prepare_model_for_kbit_training`` ends with ``torch.cuda.empty_cache()``; source: peft/utils/other.py."""
    stretch = _stretch(schedule, "prepare")
    if schedule.script.empties_cache and stretch.end > stretch.begin:
        allocator.empty_cache()


def _first_products(schedule: Schedule) -> tuple[int, int]:
    """Return the events before which cuBLAS takes its workspaces: after the results of the first products.

    The thread that runs forward and the one that runs backward have a handle each, and a handle takes its workspace in
    its first product.
    """
    tape, stretch = schedule.life.tape, _stretch(schedule, "first")
    events = schedule.events[stretch.begin : stretch.end]
    sources = schedule.life.sources[schedule.sources[np.where(events >= 0, events, ~events)]]
    is_product = np.array([name.split(".")[-1] in PRODUCTS for name in tape.operator_names])
    multiplies = is_product[np.array(tape.operators)[sources]]
    if schedule.script.rotates_by_product:
        is_rotary = np.array([name.endswith("rotary_emb") for name in tape.module_names])
        multiplies |= is_rotary[np.array(tape.modules)[sources]]
    names = np.array(tape.phase_names)[schedule.phases[stretch.begin : stretch.end]]
    is_backward = np.isin(names, ("backward", "recompute"))
    found = []
    for phase, start in ((~is_backward, 0), (is_backward, int(np.argmax(is_backward)))):
        where = np.flatnonzero(multiplies & phase & (events >= 0))
        found.append(stretch.begin + (int(where[0]) + 1 if len(where) else start))
    return found[0], found[1]


def alive_at(schedule: Schedule, index: int) -> Any:
    """Return the tokens that are alive after event ``index``."""
    events = schedule.events[: index + 1]
    alive = np.zeros(len(schedule.sources), dtype=bool)
    alive[events[events >= 0]] = True
    alive[~events[events < 0]] = False
    return np.flatnonzero(alive)


def _breakdown(schedule: Schedule, alive: Any, replay: Replay, peak: int, process: int, base: int) -> dict[str, int]:
    sums = np.bincount(
        schedule.categories[alive], weights=schedule.sizes[alive].astype(np.float64), minlength=len(MEMORY_CATEGORIES)
    )
    breakdown = {name: int(value) for name, value in zip(MEMORY_CATEGORIES, sums, strict=True) if value}
    breakdown["workspace"] = replay.workspace if peak >= replay.workspace_from else 0
    breakdown["context"] = base
    # What is reserved and not in use at the peak, and the rounding of blocks.
    breakdown["cached"] = process - sum(breakdown.values())
    return {name: value for name, value in breakdown.items() if value}


def _interval(
    device: Device, breakdown: Mapping[str, int], allocated: int, reserved: int, base: int, extra: float
) -> tuple[int, int]:
    moving = sum(breakdown.get(name, 0) for name in ("activation", "temporary", "autograd_detail"))
    unseen = UNSEEN_KERNELS * moving
    if not device.has_caching_allocator:
        return round(allocated * 0.95 + 0.7 * base), round(
            (allocated + unseen) * (1 + CPU_OVERHEAD + extra) + 1.2 * base
        )
    low = allocated * (1 - 0.5 * UNSEEN_KERNELS) + base * (1 - CONTEXT_LOW)
    loose = max(reserved - breakdown.get("parameter", 0), 0)
    high = reserved + unseen + FRAGMENTATION * loose + base * (1 + CONTEXT_HIGH) + extra * reserved + 64 * MIB
    return round(low), round(high)


def _verdict(
    schedule: Schedule, device: Device, torch_version: str, expandable: bool, process: int, low: int, high: int
) -> Verdict:
    capacity = device.capacity_bytes
    if high <= capacity:
        return "fits"
    if low > capacity:
        return "does_not_fit"
    if process <= capacity or not device.has_caching_allocator:
        return "tight"
    try:  # Freeing cached memory when the driver has no more may still save the run.
        # Whether holes suffice there depends on the order of frees to the byte, so the replay gets some room.
        replay_schedule(
            schedule, device, torch_version, expandable, round((capacity - device.context_bytes) * (1 + HOLES))
        )
    except OutOfCapacity:
        return "does_not_fit"
    return "tight"


def _rest(schedule: Schedule, replay: Replay) -> int:
    """Return allocated bytes between steps, when the optimizer state exists."""
    last = max((item for item in schedule.stretches if item.name == "zero"), key=lambda item: item.end)
    return int(replay.allocated[last.end - 1])


def _peak_by_phase(schedule: Schedule, replay: Replay) -> dict[str, int]:
    names = schedule.life.tape.phase_names
    peaks = {
        name: int(replay.allocated[schedule.phases == index].max())
        for index, name in enumerate(names)
        if (schedule.phases == index).any()
    }
    # Saving copies each tensor to the host and takes nothing on the device.
    peaks["save"] = _rest(schedule, replay)
    return peaks


def holders_of(schedule: Schedule, alive: Any, limit: int = MAX_HOLDERS) -> list[PeakHolder]:
    """Return who made the storages ``alive``, largest first, equal layers added up."""
    tape = schedule.life.tape
    sources = schedule.life.sources[schedule.sources[alive]]
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    sizes, categories = schedule.sizes[alive], schedule.categories[alive]
    star = starred(tuple(tape.module_names))
    for source, size, category in zip(sources.tolist(), sizes.tolist(), categories.tolist(), strict=True):
        name = MEMORY_CATEGORIES[category]
        operator = "" if name == "parameter" else tape.operator_names[tape.operators[source]]
        entry = sums[(name, star[tape.modules[source]], operator)]
        entry[0] += size
        entry[1] += 1
    rows = [PeakHolder(*key, num_bytes, count) for key, (num_bytes, count) in sums.items()]
    return sorted(rows, key=lambda row: -row.num_bytes)[:limit]


@functools.lru_cache(maxsize=32)
def starred(names: tuple[str, ...]) -> list[str]:
    """Return module paths with layer numbers as ``*``."""
    return [re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names]


def _timeline(schedule: Schedule, replay: Replay, peak: int) -> Timeline:
    """Return allocated bytes by category, thinned to the highest instant of each of TIMELINE_POINTS stretches."""
    count = len(schedule.events)
    edges = np.unique(np.linspace(0, count, min(TIMELINE_POINTS, count) + 1).astype(np.int64))
    starts = edges[:-1]
    highest = np.maximum.reduceat(replay.allocated, starts)
    # The first instant of each stretch that is as high as the stretch gets.
    tops = np.flatnonzero(replay.allocated == np.repeat(highest, np.diff(edges)))
    chosen = tops[np.unique(np.searchsorted(starts, tops, side="right"), return_index=True)[1]]
    events = schedule.events
    tokens = np.where(events >= 0, events, ~events)
    signed = np.where(events >= 0, 1, -1) * schedule.sizes[tokens]
    categories = schedule.categories[tokens]
    series: dict[str, list[int]] = {}
    for index, name in enumerate(MEMORY_CATEGORIES):
        mask = categories == index
        if mask.any():
            series[name] = np.cumsum(np.where(mask, signed, 0))[chosen].tolist()
    if replay.workspace:
        series["workspace"] = np.where(chosen >= replay.workspace_from, replay.workspace, 0).tolist()
    phases = schedule.phases[chosen]
    names = schedule.life.tape.phase_names
    changes = [0, *(np.flatnonzero(np.diff(phases)) + 1).tolist()]
    return Timeline(
        bytes_by_category=series,
        phases=[(index, names[int(phases[index])]) for index in changes],
        reserved_bytes=replay.reserved[chosen].tolist(),
        peak_index=int(np.searchsorted(starts, peak, side="right") - 1),
    )
