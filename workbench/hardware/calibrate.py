"""Measure this machine's device: matrix products, bandwidth, attention, dequantisation, cost of one operator.

What a time estimate needs is not the data sheet but what torch's kernels reach here. Every figure is the best of a few
repetitions, so that another process on the machine disturbs little. The whole takes under ten seconds on two cores.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..events import Cancel, Progress, ProgressCallback
from ..units import GIB
from . import probes
from .device import Device
from .overhead import overhead_s
from .store import Profile, save_profile

if TYPE_CHECKING:
    import torch

# Matrix products by size class: (rows, inner, columns). A LoRA matrix is "narrow": one side is the rank, so that the
# product reads much and computes little.
GEMM_SHAPES = {"large": (1024, 2048, 2048), "medium": (512, 576, 1536), "narrow": (1024, 1024, 16)}
# Longest single call of a probe, where a shorter one can stand in for it.
MAX_PROBE_S = 0.5
# A bandwidth probe has to be far larger than the last-level cache.
GPU_PROBE_BYTES = GIB
SECONDS_PER_PROBE = 0.25
# A CPU has hundreds of points (shapes, sizes, operators).
SECONDS_PER_POINT = 0.004
LAYOUTS = ("nn", "nt", "tn")
QUICK_SIDE = 128
QUICK_S = 0.01


def calibrate_device(
    progress: ProgressCallback | None = None, cancel: Cancel | None = None, *, kind: str = "auto"
) -> Device:
    """Measure this machine's device, store the profile for this torch version, and return the device with it.

    Args:
        progress: Told about each probe, stage ``"calibrate"``.
        cancel: Looked at between probes.
        kind: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        Cancelled: The user cancelled; nothing was stored.
    """
    from .local import apply_profile, read_device

    device = read_device(kind)
    on_gpu = device.kind != "cpu"
    profile = (_measure_gpu if on_gpu else _measure_cpu)(device.name, progress, cancel)
    save_profile(profile)
    return apply_profile(device, profile)


def measure_quickly(device_name: str, num_threads: int) -> Profile:
    """Return a profile of this CPU from less than a second of measuring; it serves until someone calibrates."""
    import torch

    clock = probes.process_clock(num_threads)
    rates: dict[str, probes.Points] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for layout in LAYOUTS:
            key = f"matmul.{str(dtype)[6:]}.{layout}"
            rates[key] = probes.product_points(dtype, layout, clock, QUICK_S, (QUICK_SIDE,))
    bandwidth = probes.operator_points("add", clock, QUICK_S)[-1][1]
    return Profile(
        device_name=device_name,
        torch_version=torch.__version__,
        num_threads=num_threads,
        bandwidth_bytes_per_s=bandwidth,
        flops_per_s=_cpu_flops(rates),
        launch_s=_launch("cpu", seconds=0.05),
        rates=rates,
        is_quick=True,
    )


def _measure_cpu(name: str, progress: ProgressCallback | None, cancel: Cancel | None) -> Profile:
    """Measure a CPU: see ``probes.py``."""
    import torch

    num_threads = torch.get_num_threads()
    clock, seconds = probes.process_clock(num_threads), SECONDS_PER_POINT
    work: dict[str, Callable[[], probes.Points]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for layout in LAYOUTS:
            points = functools.partial(probes.product_points, dtype, layout, clock, seconds)
            work[f"matmul.{str(dtype)[6:]}.{layout}"] = points
        for direction in ("forward", "backward"):
            points = functools.partial(probes.attention_points, direction == "backward", dtype, clock, seconds)
            work[f"attention.{direction}.{str(dtype)[6:]}"] = points
    work["gemm_4bit.float32"] = functools.partial(probes.packed_points, clock, seconds)
    work["dequantize_4bit"] = functools.partial(probes.dequantize_points, clock, seconds)
    work["optimizer_update_8bit_blockwise"] = functools.partial(probes.eight_bit_points, clock, seconds)
    for operator in probes.OPERATORS:
        work[operator] = functools.partial(probes.operator_points, operator, clock, seconds)
    rates: dict[str, probes.Points] = {}
    probes.settle_heap()
    for index, (key, measure) in enumerate(work.items()):
        _tell(progress, cancel, index, len(work) + 1, key)
        rates[key] = measure()
    _tell(progress, cancel, len(work), len(work) + 1, "overhead")
    overheads = overhead_s(clock, SECONDS_PER_PROBE)
    return Profile(
        device_name=name,
        torch_version=torch.__version__,
        num_threads=num_threads,
        # Large enough to leave the cache, small enough not to be mapped anew each time.
        bandwidth_bytes_per_s=rates["add"][len(probes.OPERAND_BYTES) - 1][1],
        flops_per_s=_cpu_flops(rates),
        launch_s=overheads["forward"],
        rates={key: points for key, points in rates.items() if points},
        overhead_s=overheads,
    )


def _cpu_flops(rates: Mapping[str, probes.Points]) -> dict[str, float]:
    """Return one rate for each dtype: that of the largest products measured, as a linear layer's step mixes layouts.

    float16 is taken as bfloat16: a CPU without 16-bit units computes neither itself.
    """
    mixed = {
        dtype: len(LAYOUTS) / sum(1 / rates[f"matmul.{dtype}.{layout}"][-1][-1] for layout in LAYOUTS)
        for dtype in ("float32", "bfloat16")
    }
    plain = mixed["float32"]
    return {**mixed, "tf32": plain, "int8": plain, "float16": mixed["bfloat16"]}


def _tell(progress: ProgressCallback | None, cancel: Cancel | None, done: int, total: int, key: str) -> None:
    if cancel is not None:
        cancel.check()
    if progress is not None:
        progress(Progress("calibrate", done, total, f"Measuring {key}"))


def _measure_gpu(name: str, progress: ProgressCallback | None, cancel: Cancel | None) -> Profile:
    import torch

    kind = "cuda"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    measured: dict[str, float] = {}
    planned: list[tuple[str, Callable[[], float]]] = [("bandwidth", lambda: _bandwidth(kind))]
    for dtype_name, dtype in dtypes.items():
        for size in ("medium", "narrow", "large"):
            planned.append((f"matmul.{dtype_name}.{size}", _bind(_gemm_probe, kind, dtype, size, measured)))
    planned.append(("attention", lambda: _attention_rate(kind, torch.float16)))
    planned.append(("dequantize.4", lambda: _dequantize_rate(kind)))
    for index, (key, probe) in enumerate(planned):
        _tell(progress, cancel, index, len(planned) + 1, key)
        measured[key] = probe()
    _tell(progress, cancel, len(planned), len(planned) + 1, "overhead")
    overheads = overhead_s(time.perf_counter, SECONDS_PER_PROBE, kind)
    return _profile_of(name, measured, list(dtypes), overheads)


def _profile_of(name: str, measured: dict[str, float], dtype_names: list[str], overheads: dict[str, float]) -> Profile:
    import torch

    best = {dtype: max(measured[f"matmul.{dtype}.{size}"] for size in GEMM_SHAPES) for dtype in dtype_names}
    efficiency = {
        f"matmul.{dtype}.{size}": measured[f"matmul.{dtype}.{size}"] / best[dtype]
        for dtype in dtype_names
        for size in GEMM_SHAPES
    }
    efficiency["attention"] = measured["attention"] / best["float16"]
    efficiency["elementwise"] = 1.0
    if measured["dequantize.4"] > 0:
        efficiency["dequantize.4"] = measured["dequantize.4"] / measured["bandwidth"]
    flops = {"tf32": best["float32"], "int8": best["float16"], **best}
    return Profile(
        device_name=name,
        torch_version=torch.__version__,
        num_threads=0,
        bandwidth_bytes_per_s=measured["bandwidth"],
        flops_per_s=flops,
        launch_s=overheads["forward"],
        efficiency=efficiency,
        overhead_s=overheads,
    )


def _gemm_probe(kind: str, dtype: torch.dtype, size: str, measured: dict[str, float]) -> float:
    """Return the rate of one product; that of the medium one where this one would take longer than MAX_PROBE_S.

    Without 16-bit units a CPU takes seconds for a large product in bfloat16, and is no faster with it.
    """
    name = str(dtype)[6:]
    known = measured.get(f"matmul.{name}.medium")
    if known is not None and _product(GEMM_SHAPES[size]) / known > MAX_PROBE_S:
        return known
    return _gemm_rate(kind, dtype, GEMM_SHAPES[size])


def _product(shape: tuple[int, int, int]) -> int:
    return 2 * shape[0] * shape[1] * shape[2]


def _bind(function: Callable[..., float], *args: object) -> Callable[[], float]:
    return lambda: function(*args)


def best_time(work: Callable[[], object], kind: str, seconds: float | None = None) -> float:
    """Return the shortest time of one call of ``work``, repeated for ``seconds`` (SECONDS_PER_PROBE by default)."""
    import torch

    def once() -> float:
        start = time.perf_counter()
        work()
        if kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    deadline = time.perf_counter() + (SECONDS_PER_PROBE if seconds is None else seconds)
    best = once()
    if best < MAX_PROBE_S:  # It also warmed caches and libraries up; the next call is the first that counts.
        best = once()
    while time.perf_counter() < deadline:
        best = min(best, once())
    return max(best, 1e-9)


def _gemm_rate(kind: str, dtype: torch.dtype, shape: tuple[int, int, int], seconds: float | None = None) -> float:
    import torch

    rows, inner, columns = shape
    left = torch.ones(rows, inner, dtype=dtype, device=kind)
    right = torch.ones(inner, columns, dtype=dtype, device=kind)
    return 2 * rows * inner * columns / best_time(lambda: left @ right, kind, seconds)


def _bandwidth(kind: str) -> float:
    import torch

    source = torch.ones(GPU_PROBE_BYTES // 4, device=kind)
    return 2 * GPU_PROBE_BYTES / best_time(lambda: source * 2.0, kind)


def _launch(kind: str, seconds: float | None = None) -> float:
    import torch

    small = torch.ones(16, 16, device=kind, requires_grad=True)
    count = 200

    def chain() -> None:
        value = small
        for _ in range(count):
            value = value * 1.01
        value.sum().backward()

    return best_time(chain, kind, seconds) / (2 * count)


def _attention_rate(kind: str, dtype: torch.dtype) -> float:
    import torch

    batch, heads, length, size = 1, 8, 1024, 64
    query = torch.ones(batch, heads, length, size, dtype=dtype, device=kind)
    flops = 4 * batch * heads * length * length * size / 2  # causal: half of the square
    attend = torch.nn.functional.scaled_dot_product_attention
    return flops / best_time(lambda: attend(query, query, query, is_causal=True), kind)


def _dequantize_rate(kind: str) -> float:
    """Return bytes per second (packed read plus 16-bit written) of 4-bit dequantisation; 0 without bitsandbytes."""
    import torch

    try:
        from bitsandbytes import functional
    except ImportError:
        return 0.0
    weight = torch.ones(2048, 2048, dtype=torch.float32, device=kind)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4")
    num_bytes = packed.numel() + weight.numel() * 4
    return num_bytes / best_time(lambda: functional.dequantize_4bit(packed, state), kind)
