"""Seconds of operators on a CPU, from what was measured of it: a rate for each kind of work, and the cost of a call.

On a CPU nothing overlaps: an operator takes what its kernel takes, and what Python, the dispatcher and autograd take to
reach it. Rates lie on curves over shapes and sizes, which ``hardware/probes.py`` measures; no figure of any model is in
here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..hardware import Device
from ..hardware.curves import Curve
from .tape import Work

# Phases whose operators are reached through modules, and so cost what a forward pass costs.
_THROUGH_MODULES = ("forward", "recompute", "evaluation")
# Operators that do the same as one that is measured.
_SAME_WORK = {
    "_foreach_norm": "linalg_vector_norm",
    "norm": "linalg_vector_norm",
    "copy_": "clone",
    "sub": "add",
    "sub_": "add_",
    "neg": "pow",
    "abs": "pow",
    "rsqrt": "sqrt",
    "reciprocal": "sqrt",
    "sigmoid": "silu",
    "exp": "silu",
    "sigmoid_backward": "mul",
    "tanh_backward": "silu_backward",
    "embedding": "clone",
    "index_select": "clone",
    "index": "clone",
    "constant_pad_nd": "slice_backward",
    "repeat": "clone.strided",
}
# What a rate is taken from where an operator was not measured: it reads and writes plain memory.
_PLAIN, _IN_PLACE = "mul", "mul_"


class CpuRates:
    """Seconds of operators on one CPU.

    Args:
        device: The CPU; without measured curves (a profile made in a second) its few plain rates serve.
        phase_names: ``Tape.phase_names`` of the work.
    """

    def __init__(self, device: Device, phase_names: Sequence[str]) -> None:
        self._device = device
        self._overheads = [device.overhead_s.get(overhead_place(name), device.launch_s) for name in phase_names]
        self._curve = functools.cache(self._find_curve)
        self._product_s = functools.cache(self._seconds_of_product)

    def overhead(self, work: Work) -> float:
        """Return what reaching the operator costs, in seconds."""
        return self._overheads[work.phase]

    def seconds(self, work: Work) -> float:
        """Return the seconds of its kernel."""
        operator = work.operator
        if "attention" in operator:
            direction = "backward" if "backward" in operator else "forward"
            curve = self._curve((f"attention.{direction}.{work.dtype}", f"attention.{direction}.float32"))
            length, size = (work.shape[0], work.shape[2]) if work.shape else (1, 1)
            rate = self._device.flops_per_s["float32"] * 0.5 if curve is None else curve.at(length, size)
            return work.flops / rate
        if work.shape:
            return self._product_s(operator, work.dtype, work.access, work.shape) if work.flops else 0.0
        return work.num_bytes / self._bytes_per_s(work)

    def is_compute(self, work: Work) -> bool:
        """Whether an operator computes longer than it takes to move its bytes."""
        return bool(work.flops) and self.seconds(work) > work.num_bytes / self._device.bandwidth_bytes_per_s

    def _seconds_of_product(self, operator: str, dtype: str, access: str, shape: tuple[int, int, int]) -> float:
        flops = 2 * shape[0] * shape[1] * shape[2]
        if operator.startswith("bitsandbytes."):
            keys: tuple[str, ...] = ("gemm_4bit.float32",)
        else:
            known = "bfloat16" if dtype == "float16" else dtype
            keys = (f"matmul.{known}.{access}", f"matmul.{known}.tn", f"matmul.{known}.nt")
        curve = self._curve(keys)
        rate = self._device.flops_per_s.get(dtype, self._device.flops_per_s["float32"])
        return flops / (rate if curve is None else curve.at(*shape))

    def _bytes_per_s(self, work: Work) -> float:
        name = work.operator.rsplit(".", 1)[-1]
        name = _SAME_WORK.get(name, name)
        if work.access == "strided" and name in ("clone", "_to_copy"):
            name = "clone.strided"
        fallback = _IN_PLACE if name.endswith("_") else _PLAIN
        curve = self._curve((f"{name}.{work.dtype}", name, fallback))
        return self._device.bandwidth_bytes_per_s if curve is None else curve.at(work.num_bytes)

    def _find_curve(self, keys: tuple[str, ...]) -> Curve | None:
        for key in keys:
            points = self._device.rates.get(key)
            if points:
                return Curve(points)
        return None


def overhead_place(phase: str) -> str:
    """Return the entry of ``Device.overhead_s`` that holds for operators of a phase."""
    if phase in _THROUGH_MODULES:
        return "forward"
    return phase if phase == "backward" else "optimizer"


def slowdown(device: Device, works: Sequence[Work], dtype: str = "bfloat16") -> float:
    """Return how many times longer the matrix products of ``works`` in a dtype take than the same in float32.

    Returns:
        1.0 where there are none.
    """
    rates = CpuRates(device, ["forward"])
    slow = plain = 0.0
    for work in works:
        if work.shape and work.dtype == dtype and work.access:
            slow += rates._product_s(work.operator, dtype, work.access, work.shape)
            plain += rates._product_s(work.operator, "float32", work.access, work.shape)
    return slow / plain if plain else 1.0
