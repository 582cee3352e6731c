"""Device: the machine a run is estimated for, read from this one or looked up by name."""

from __future__ import annotations

import difflib
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from ..errors import DeviceError
from ..recipe import Recipe, TargetFacts
from ..units import MIB, format_bytes, parse_bytes
from .curves import Points

TERA = 1e12
# Cards whose power limit does not let them hold their peak clock: share of the table's peaks that products can use. The
# 70 W of a T4 sustain 35 to 45 % of its peak, where products on other cards reach 60 to 80 % (note of the table's row).
_SUSTAINED = {"Tesla T4": 0.57}
GIGA = 1e9


@dataclass(frozen=True)
class Device:
    """One device and what its speed and capacity are known to be.

    Attributes:
        name: As ``torch.cuda.get_device_name`` prints it, or ``"CPU"`` with its model.
        kind: ``"cuda"``, ``"rocm"``, ``"mps"`` or ``"cpu"``.
        capacity_bytes: What one process can use: ``total_memory`` as torch reports it, or the RAM.
        compute_capability: ``(major, minor)`` for NVIDIA, else None.
        bf16_native: Whether bfloat16 is computed natively.
        bandwidth_bytes_per_s: Peak memory bandwidth.
        flops_per_s: Dense peak that can be sustained, by dtype name (``"float32"``, ``"tf32"``, ``"float16"``,
            ``"bfloat16"``, ``"int8"``), with float32 accumulation.
        sm_count: Streaming multiprocessors, or cores.
        context_bytes: What the driver and loaded kernels take outside the allocator.
        price_per_hour_usd: ``(low, high)`` of dated offers, or None.
        source: ``"this machine"`` or ``"table"``.
        is_emulated: True when it is not the device of this machine.
        efficiency: Measured fractions of the peaks by operator class, from ``calibrate``; empty when not measured.
        launch_s: On a GPU the time the driver takes to launch one kernel; on a CPU what reaching one operator costs.
        rates: Measured rates of a CPU by kind of work, each over shapes or sizes, see ``probes.py``.
        overhead_s: Measured time of reaching one operator on the host (launch included on a GPU), by phase: forward,
            backward, optimizer.
    """

    name: str
    kind: str
    capacity_bytes: int
    compute_capability: tuple[int, int] | None = None
    bf16_native: bool = True
    bandwidth_bytes_per_s: float = 0.0
    flops_per_s: dict[str, float] = field(default_factory=dict)
    sm_count: int = 0
    context_bytes: int = 0
    price_per_hour_usd: tuple[float, float] | None = None
    source: str = "table"
    is_emulated: bool = True
    efficiency: dict[str, float] = field(default_factory=dict)
    launch_s: float = 6e-6
    rates: Mapping[str, Points] = field(default_factory=dict)
    overhead_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_caching_allocator(self) -> bool:
        """Whether torch's CUDA caching allocator manages its memory."""
        return self.kind in ("cuda", "rocm")

    def facts(self, *, for_estimate: bool) -> TargetFacts:
        """Return what the Recipe's rules need to know."""
        return TargetFacts(
            name=self.name,
            kind="cuda" if self.has_caching_allocator else "cpu",
            bf16_native=self.bf16_native,
            compute_capability=self.compute_capability,
            for_estimate=for_estimate,
        )

    def describe(self) -> str:
        """Return one line for a person."""
        return f"{self.name}, {format_bytes(self.capacity_bytes)}"


@functools.cache
def _table() -> list[dict[str, Any]]:
    text = resources.files(__package__).joinpath("tables/devices.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)["gpus"]
    return rows


def device_names() -> list[str]:
    """Return the names of the device table whose memory is managed by the caching allocator."""
    return [row["name"] for row in _table() if row["driver_total_mib"]]


def find_device(name: str) -> Device:
    """Return the Device of a name or alias of the table; case, spaces and dashes do not matter.

    ``"NAME:15GiB"`` sets another capacity, for a card that is partly in use.

    Raises:
        DeviceError: No such device; the nearest names are listed.
    """
    wanted, _, capacity = name.partition(":")
    keys: dict[str, dict[str, Any]] = {}
    for row in _table():
        for alias in (row["name"], *(row.get("aliases") or ())):
            keys[_key(alias)] = row
    for row in _table():  # Short names such as "A100" or "4090" where only one row fits.
        short = _key(row["name"]).removeprefix("geforce")
        keys.setdefault(short, row)
    found = keys.get(_key(wanted))
    if found is None:
        partial = {id(row): row for key, row in keys.items() if len(_key(wanted)) > 1 and _key(wanted) in key}
        if len(partial) == 1:
            found = next(iter(partial.values()))
        else:
            near = [row["name"] for row in partial.values()] or difflib.get_close_matches(
                wanted, [row["name"] for row in _table()], n=4, cutoff=0.3
            )
            hint = f"Did you mean {', '.join(near)}?" if near else f"Known are {', '.join(device_names())}."
            raise DeviceError(f"{name!r} is not in the device table. {hint}")
    device = _from_row(found)
    if capacity:
        try:
            device = _replace_capacity(device, parse_bytes(capacity))
        except ValueError as error:
            raise DeviceError(f"{name!r}: {error}") from None
    return device


def read_device(kind: str = "auto") -> Device:
    """Return the device of this machine: the current CUDA device, or the CPU.

    Args:
        kind: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        DeviceError: ``"cuda"`` was asked for and there is none.
    """
    from . import local

    return local.read_device(kind)


def target_device(recipe: Recipe, name: str | None = None) -> Device:
    """Return the device an estimate is for: ``name``, else ``hardware.emulate``, else this machine's.

    Raises:
        DeviceError: The name is not in the table, or the device is not in this machine.
    """
    wanted = name or recipe.hardware.emulate
    if wanted and wanted.lower() not in ("cpu", "this machine"):
        return find_device(wanted)
    return read_device("cpu" if wanted and wanted.lower() == "cpu" else recipe.hardware.device)


def _key(name: str) -> str:
    lowered = name.lower()
    for word in ("nvidia", "tesla"):
        lowered = lowered.replace(word, "")
    return "".join(letter for letter in lowered if letter.isalnum())


def _from_row(row: dict[str, Any]) -> Device:
    rates = row["dense_tflops"]
    flops = {
        "float32": rates["fp32"],
        "tf32": rates["tf32"] or rates["fp32"],
        "float16": rates["fp16_fp32acc"] or rates["fp32"],
        # Where bf16 is not native it is emulated through float32.
        "bfloat16": rates["bf16_fp32acc"] or rates["fp32"],
        "int8": rates["int8_tops"] or rates["fp16_fp32acc"] or rates["fp32"],
    }
    capability = str(row["compute_capability"])
    is_nvidia = row.get("vendor") == "NVIDIA"
    total_gib = row["torch_total_gib_typical"]
    if is_nvidia:
        kind = "cuda"
    elif capability.startswith("gfx"):
        kind = "rocm"
    else:
        kind = "mps"
    capacity = round(total_gib * 1024 * MIB) if total_gib else round((row["marketed_gb"] or 32) * 0.75 * 1024 * MIB)
    prices = [offer["usd"] for offer in row.get("price_usd_per_hour") or ()]
    return Device(
        name=row["name"],
        kind=kind,
        capacity_bytes=capacity,
        compute_capability=tuple(map(int, capability.split("."))) if is_nvidia else None,  # type: ignore[arg-type]  # two parts
        bf16_native=bool(row["bf16_native"]),
        bandwidth_bytes_per_s=row["bandwidth_gbs"] * GIGA,
        flops_per_s={name: rate * TERA * _SUSTAINED.get(row["name"], 1.0) for name, rate in flops.items()},
        sm_count=row["sm_count"] or 0,
        context_bytes=context_bytes(row.get("context_local_mem_pool_mib_estimate") or 0) if kind != "mps" else 0,
        price_per_hour_usd=(min(prices), max(prices)) if prices else None,
    )


# What the driver takes for a process before any kernel runs grows with the threads that can be resident: two readings
# of mem_get_info under torch 2.10 give the line. Tesla T4 (40 MiB of 1 KiB stacks): 104.875 MiB, fitcheck-llm 0.3.1,
# data/measurements/final-t4-20260921.json; RTX 6000 Ada (213 MiB): 426 MiB, unslothai/unsloth-zoo#1053. A Titan V
# (160 MiB) under bare CUDA, 319 MiB in pytorch/pytorch#28394, lies within 3 % of it.
_CONTEXT_BASE_MIB = 30.6
_CONTEXT_PER_STACK_MIB = 1.856
# Kernels that a training loop of attention, matrix products, AdamW and bitsandbytes loads on the way: 140.875 MiB at
# the peak of every T4 row of the same files, under torch 2.10 and 2.14.
_LOADED_KERNELS_MIB = 36.0


def context_bytes(local_memory_pool_mib: float) -> int:
    """Return what a process takes on an NVIDIA GPU outside torch's allocator, in bytes, with lazily loaded kernels.

    Args:
        local_memory_pool_mib: SMs x resident threads x 1 KiB, in MiB, from the device table.

    Source:
        Readings named beside the constants. CUDA before 11.7 (torch before 1.13) loaded every kernel at once, about
        1 GiB more (pytorch/pytorch#107667).
    """
    mib = _CONTEXT_BASE_MIB + _CONTEXT_PER_STACK_MIB * local_memory_pool_mib + _LOADED_KERNELS_MIB
    return round(mib * MIB)


def _replace_capacity(device: Device, capacity_bytes: int) -> Device:
    import dataclasses

    return dataclasses.replace(device, capacity_bytes=capacity_bytes)


def ram_bytes() -> int:
    """Return the memory this process may use: the cgroup's limit where there is one, else the machine's RAM."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 * 1024 * MIB
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                limit = file.read().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total
