"""Step time by a roofline over the traced operators: the slower of computing and moving, for each operator.

Rates are the device's peaks (or measured ones, see ``hardware/calibrate.py``) times what operators of a class usually
reach of them. The host launches operators one by one; where that takes longer than the device, the device waits.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..hardware import Device
from ..recipe import Recipe
from .cpu_time import CpuRates, overhead_place
from .estimate import BatchShape, TimeEstimate
from .recorder import HOST_COPY
from .tape import Work
from .unroll import Life

# Fractions of the table's peaks that operators reach where nothing was measured. Dense matrix products reach 0.6 to
# 0.8 of the dense peak and element-wise kernels about 0.8 of the bandwidth on every NVIDIA generation from T4 to H100.
MATMUL_EFFICIENCY = 0.7
ATTENTION_EFFICIENCY = 0.45
BANDWIDTH_EFFICIENCY = 0.8
# Rows and columns of the output one thread block makes; a partly filled last wave of blocks wastes the rest of it.
TILE = 128
# Uncertainty of step_s by where the rates come from.
SPREAD = {"table": 0.35, "calibrated": 0.2, "quick": 0.4, "anchored": 0.05}
# A product with a side below this is bound by reading, not computing; calibration measures it apart.
NARROW = 64


# Bytes/s that copies from pinned memory reach over 16 lanes of PCIe 3, 4 and 5: about 0.8 of 15.8, 31.5 and 63 GB/s.
# Source: PCI-SIG's rates for x16; GPUs below compute capability 8 have version 3, below 9 version 4, then 5.
HOST_LINK_BYTES_PER_S = (12e9, 25e9, 50e9)

# What it costs a host to reach one operator, Python's modules, the dispatcher and autograd included: what
# ``hardware/overhead.py`` measures on one core of an AMD EPYC server with torch 2.13. Hosts of cloud machines differ by
# a factor of two either way, which the interval covers; ``calibrate`` measures the host at hand.
HOST_OVERHEAD_S = {"forward": 24e-6, "backward": 12e-6, "optimizer": 4e-6}


def _host_link(device: Device) -> float:
    major = (device.compute_capability or (0, 0))[0]
    return HOST_LINK_BYTES_PER_S[0 if major < 8 else 1 if major < 9 else 2]


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by operator class and by what bounds each operator, and its operations."""

    by_class: dict[str, float]
    by_limit: dict[str, float]
    flops: float
    num_operators: int


def estimate_time(recipe: Recipe, device: Device, life: Life, shape: BatchShape) -> TimeEstimate:
    """Return the predicted time of one optimizer step.

    Args:
        recipe: The settings.
        device: The target, with its rates.
        life: The unrolled trace.
        shape: Batches; the trace has the longest one, the mean one decides the time.
    """
    step = _step_time(recipe, device, life, shape)
    step_s = sum(step.by_class.values())
    basis, spread = _basis(device)
    training = recipe.training
    samples = shape.batch_size * training.gradient_accumulation_steps
    num_steps = _num_steps(recipe, shape)
    total_s = None if num_steps is None else num_steps * step_s
    return TimeEstimate(
        step_s=step_s,
        tokens_per_s=samples * shape.mean_real_tokens / step_s,
        samples_per_s=samples / step_s,
        seconds_by_class=step.by_class,
        flops=step.flops,
        basis=basis,
        interval_s=(step_s * (1 - spread), step_s / (1 - spread)),
        total_s=total_s,
        num_steps=num_steps,
        cost_usd=_cost(recipe, device, total_s),
        cost_usd_per_1000_tokens=_cost(recipe, device, 1000 / (samples * shape.mean_real_tokens) * step_s),
        epoch_s=_epoch_s(recipe, shape, step_s),
        seconds_by_limit=step.by_limit,
    )


def _basis(device: Device) -> tuple[str, float]:
    if device.efficiency or device.overhead_s:
        return "calibrated", SPREAD["calibrated"]
    if device.source == "this machine" and not device.has_caching_allocator:
        return "calibrated", SPREAD["quick"]
    return "table", SPREAD["table"]


def _num_steps(recipe: Recipe, shape: BatchShape) -> int | None:
    training = recipe.training
    if recipe.phases.steps:
        return sum(recipe.phases.steps)
    if training.max_steps > 0:
        return training.max_steps
    if shape.num_samples is None:
        return None
    return max(1, math.ceil(_steps_per_epoch(recipe, shape.num_samples, shape) * training.num_train_epochs))


def _steps_per_epoch(recipe: Recipe, num_samples: int, shape: BatchShape) -> int:
    batches = math.ceil(num_samples / shape.batch_size)
    return math.ceil(batches / recipe.training.gradient_accumulation_steps)


def _epoch_s(recipe: Recipe, shape: BatchShape, step_s: float) -> float | None:
    """Return the seconds of one pass over the data; None where the number of samples is not known."""
    return None if shape.num_samples is None else step_s * _steps_per_epoch(recipe, shape.num_samples, shape)


def _cost(recipe: Recipe, device: Device, total_s: float | None) -> tuple[float, float] | None:
    if total_s is None:
        return None
    price = recipe.cost.price_per_hour_usd
    low_high = device.price_per_hour_usd if price is None else (price, price)
    return None if low_high is None else (low_high[0] * total_s / 3600, low_high[1] * total_s / 3600)


def _step_time(recipe: Recipe, device: Device, life: Life, shape: BatchShape) -> StepTime:
    later = recipe.training.gradient_accumulation_steps - 1
    repeats = {"first": 1, "later": later, "step_again": 1}
    segments = life.tape.work_segments()
    # The trace has the longest batch; a mean batch has less of everything that depends on tokens.
    shrink = shape.mean_length / shape.length
    by_class: dict[str, float] = defaultdict(float)
    by_limit: dict[str, float] = defaultdict(float)
    flops, num_operators = 0.0, 0.0
    on_gpu = device.has_caching_allocator
    names = life.tape.phase_names
    rates = _Rates(recipe, device, names) if on_gpu else CpuRates(device, names)
    clocks = _Clocks()
    for name, count in repeats.items():
        if name not in segments or count <= 0:
            continue
        begin, end = segments[name]
        is_step = name == "step_again"
        scale = 1.0 if is_step else shrink
        for work, weight in zip(life.tape.work[begin:end], life.weights[begin:end], strict=True):
            times = int(weight) * count
            label = "optimizer" if is_step else class_of(work)
            seconds = rates.seconds(work) * scale * times
            by_class[label] += seconds
            by_limit["compute" if rates.is_compute(work) else "bandwidth"] += seconds
            clocks.run(seconds, rates.overhead(work), times)
            flops += work.flops * scale * times
            num_operators += times
    # A GPU works while the host launches; a CPU does one after the other.
    by_class["launch"] = clocks.idle_s if on_gpu else clocks.host_s
    by_limit["launch"] = by_class["launch"]
    return StepTime(dict(by_class), dict(by_limit), flops, round(num_operators))


class _Clocks:
    """Two clocks of one step: the host launches operators in their order, the GPU works on what was launched.

    The host runs ahead while the GPU is busy; where it falls behind, the GPU waits.

    Attributes:
        host_s: Seconds the host has launched for.
        idle_s: Seconds the GPU waited for it.
    """

    def __init__(self) -> None:
        self.host_s = self.idle_s = self._device_s = 0.0

    def run(self, seconds: float, overhead_s: float, times: int) -> None:
        """Run an operator ``times`` times in a row: ``seconds`` on the device in all."""
        busy_from = self._device_s
        launched_first = self.host_s + overhead_s
        self.host_s += overhead_s * times
        after_all = max(busy_from, launched_first) + seconds
        after_last = self.host_s + seconds / times
        self._device_s = max(after_all, after_last)
        self.idle_s += self._device_s - busy_from - seconds


def anchor_time(predicted: TimeEstimate, measured_step_s: float) -> TimeEstimate:
    """Return the prediction scaled to a measured step of this very run; its ``basis`` says so.

    Args:
        predicted: From ``estimate_time``, or anchored before.
        measured_step_s: Seconds of one optimizer step after the first, which makes the optimizer's state.

    Raises:
        ValueError: ``measured_step_s`` is not positive.
    """
    if measured_step_s <= 0:
        raise ValueError(f"A step took {measured_step_s} s; give the seconds of a finished step.")
    factor = measured_step_s / predicted.step_s

    def scaled(value: float | None) -> float | None:
        return None if value is None else value * factor

    def both(values: tuple[float, float] | None) -> tuple[float, float] | None:
        return None if values is None else (values[0] * factor, values[1] * factor)

    return dataclasses.replace(
        predicted,
        step_s=measured_step_s,
        tokens_per_s=predicted.tokens_per_s / factor,
        samples_per_s=predicted.samples_per_s / factor,
        seconds_by_class={name: value * factor for name, value in predicted.seconds_by_class.items()},
        seconds_by_limit={name: value * factor for name, value in predicted.seconds_by_limit.items()},
        basis="anchored",
        interval_s=(measured_step_s * (1 - SPREAD["anchored"]), measured_step_s / (1 - SPREAD["anchored"])),
        total_s=scaled(predicted.total_s),
        epoch_s=scaled(predicted.epoch_s),
        cost_usd=both(predicted.cost_usd),
        cost_usd_per_1000_tokens=both(predicted.cost_usd_per_1000_tokens),
    )


def class_of(work: Work) -> str:
    """Return the operator class of TimeEstimate.seconds_by_class."""
    if "attention" in work.operator:
        return "attention"
    if work.operator == HOST_COPY:
        return "transfer"
    if work.operator.startswith("bitsandbytes."):
        return "dequantize"
    return "matmul" if work.shape else "elementwise"


class _Rates:
    """Seconds of operators on one GPU."""

    def __init__(self, recipe: Recipe, device: Device, phase_names: Sequence[str]) -> None:
        self._device = device
        measured_s = device.overhead_s
        host_s = measured_s or {place: seconds + device.launch_s for place, seconds in HOST_OVERHEAD_S.items()}
        self._overheads = [host_s[overhead_place(name)] for name in phase_names]
        flops = dict(device.flops_per_s)
        if recipe.training.tf32:
            flops["float32"] = flops.get("tf32", flops["float32"])
        self._flops = flops
        measured = device.efficiency
        self._bandwidth = device.bandwidth_bytes_per_s * measured.get("elementwise", BANDWIDTH_EFFICIENCY)
        self._attention = measured.get("attention", ATTENTION_EFFICIENCY)
        self._dequantize = measured.get("dequantize.4", 1.0)

    def overhead(self, work: Work) -> float:
        """Return the host's seconds to reach and launch an operator."""
        return self._overheads[work.phase]

    def seconds(self, work: Work) -> float:
        """Return the seconds of one operator, launch excluded."""
        kind = class_of(work)
        moving = work.num_bytes / self._bandwidth
        if kind == "matmul":
            return max(work.flops / self._matmul_rate(work), moving)
        if kind == "attention":
            return max(work.flops / (self._rate(work.dtype) * self._attention), moving)
        if kind == "dequantize":
            return max(work.flops / (self._rate("float16") * MATMUL_EFFICIENCY), moving / self._dequantize)
        if kind == "transfer":
            return work.num_bytes / _host_link(self._device)
        return moving

    def is_compute(self, work: Work) -> bool:
        """Whether computing, not memory, bounds an operator."""
        if not work.flops:
            return False
        reading = self._dequantize if class_of(work) == "dequantize" else 1.0
        return self.seconds(work) > work.num_bytes / self._bandwidth / reading

    def _rate(self, dtype: str) -> float:
        return self._flops.get(dtype) or self._flops["float32"]

    def _matmul_rate(self, work: Work) -> float:
        rows, inner, columns = work.shape
        smallest = min(rows, inner, columns)
        measured = self._device.efficiency
        if measured:
            size = "narrow" if smallest < NARROW else "large" if rows * inner * columns >= 2**31 else "medium"
            key = f"matmul.{work.dtype}.{size}"
            return self._rate(work.dtype) * measured.get(key, measured.get(f"matmul.float32.{size}", 1.0))
        rate = self._rate(work.dtype)
        blocks = math.ceil(rows / TILE) * math.ceil(columns / TILE)
        waves = blocks / max(1, self._device.sm_count)
        filled = waves / math.ceil(waves)
        return rate * MATMUL_EFFICIENCY * max(filled, 0.1)


def recomputed_share(life: Life) -> float:
    """Return the share of a micro-batch's operations that are computed again in backward."""
    begin, end = life.tape.work_segments()["first"]
    names = life.tape.phase_names
    flops = np.array([work.flops for work in life.tape.work[begin:end]]) * life.weights[begin:end]
    again = np.array([names[work.phase] == "recompute" for work in life.tape.work[begin:end]])
    total = float(flops.sum())
    return float(flops[again].sum()) / total if total else 0.0
