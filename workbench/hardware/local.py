"""The device of this machine."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from pathlib import Path

from ..errors import DeviceError
from ..units import MIB
from .device import Device, context_bytes, find_device, ram_bytes
from .store import Profile, load_profile


def read_device(kind: str = "auto") -> Device:
    """Return the current CUDA device of this machine, or its CPU, with the rates that were measured on it.

    Args:
        kind: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        DeviceError: ``"cuda"`` was asked for and there is none.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    if kind == "cuda" and not has_cuda:
        raise DeviceError(
            "hardware.device is cuda, but torch sees no CUDA device here. Set hardware.device=auto, or "
            "hardware.emulate='Tesla T4' to estimate for a GPU that is elsewhere."
        )
    if kind != "cpu" and has_cuda:
        return _read_cuda()
    return _read_cpu()


def cpu_name() -> str:
    """Return the name of this CPU, e.g. ``"CPU (AMD EPYC 7B13, 2 cores)"``."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = " ".join(line.split(":", 1)[1].split())
                break
    except OSError:
        pass
    return f"CPU ({name}, {_num_cores()} cores)"


def apply_profile(device: Device, profile: Profile) -> Device:
    """Return the device with measured rates in place of its own."""
    return dataclasses.replace(
        device,
        bandwidth_bytes_per_s=profile.bandwidth_bytes_per_s,
        flops_per_s={**device.flops_per_s, **profile.flops_per_s},
        efficiency=dict(profile.efficiency),
        launch_s=profile.launch_s,
        rates=dict(profile.rates),
        overhead_s=dict(profile.overhead_s),
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _has_native_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 itself (AVX512-BF16 or AMX); elsewhere torch emulates it."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine() == "arm64"
    return "avx512_bf16" in flags or "amx_bf16" in flags or " bf16 " in flags


def _read_cpu() -> Device:
    import torch

    bare = Device(
        name=cpu_name(),
        kind="cpu",
        capacity_bytes=ram_bytes(),
        bf16_native=_has_native_bf16(),
        sm_count=_num_cores(),
        source="this machine",
        is_emulated=False,
    )
    threads = torch.get_num_threads()
    profile = load_profile(bare.name, torch.__version__, threads)
    return apply_profile(bare, profile or _quick_profile(bare.name, threads))


@functools.cache
def _quick_profile(name: str, num_threads: int) -> Profile:
    from .calibrate import measure_quickly

    return measure_quickly(name, num_threads)


def _read_cuda() -> Device:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        known = find_device(properties.name)
    except DeviceError:
        known = Device(
            name=properties.name,
            kind="rocm" if torch.version.hip else "cuda",
            capacity_bytes=properties.total_memory,
            # Unknown card: a third of an A100 per SM is within a factor of two for the last three generations.
            bandwidth_bytes_per_s=1.0e12,
            flops_per_s={"float32": 15e12, "tf32": 30e12, "float16": 60e12, "bfloat16": 60e12, "int8": 120e12},
            context_bytes=context_bytes(properties.multi_processor_count * 1536 * 1024 / MIB),
        )
    device = dataclasses.replace(
        known,
        name=properties.name,
        capacity_bytes=properties.total_memory,
        compute_capability=(properties.major, properties.minor),
        bf16_native=properties.major >= 8,
        sm_count=properties.multi_processor_count,
        source="this machine",
        is_emulated=False,
    )
    profile = load_profile(device.name, torch.__version__, 0)
    return apply_profile(device, profile) if profile else device
