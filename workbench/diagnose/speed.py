"""What makes steps slower than they need be, from counts of tokens and times of the user's own run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..units import MIB, format_bytes
from .finding import Finding, Fix, make_finding

MIN_STEPS = 4
REAL_SHARE = 0.5  # Below this, more slots are padding than tokens.
SETTLED_STEP = 3  # A model compiles in its first steps; one more graph makes its shapes dynamic.
MAX_LATE_STEPS = 3
PAGES_PER_STEP = 50  # 4 KiB each: about a millisecond of a fast disk.
SWAPPED = 256 * MIB
# Share of the device's time for forward and backward that the host takes to give the work out: a host that keeps up
# takes a part of it, one that does not takes all of it.
NO_AHEAD = 0.9
WAITING_SHARE = 0.9  # Of the steps listened to, in which the same line made the host wait.
IDLE_SHARE = 0.5  # Of the device's memory that checkpointing leaves unused.


KEPT = 4096  # Newest steps and micro-batches; a watch must not grow with the run it watches.


def _series() -> deque[Any]:
    return deque(maxlen=KEPT)


@dataclass
class SpeedEvidence:
    """Per step of a run.

    Attributes:
        slots: Token slots (rows times length).
        real: Real tokens, where an attention mask says so.
        longest: Longest real row of each batch.
        widths: Length of each batch.
        step_s: Wall time.
        gc_s: Time in full garbage collections that the loop asked for.
        num_gc: How many.
        num_empty_cache: Calls of empty_cache.
        data_s: Time between the end of a step and the next forward pass.
        num_eval_forwards: Forward passes without gradients.
        num_recomputed: Of them, layers that ran through checkpointing.
        compiled_at: Step of each graph that torch.compile made; step 0 is before the first.
        num_paged_in: Pages that had to be read back from disk (major faults) during the loop.
        swap_bytes: Growth of this process's swapped memory.
        emulated_bf16: Name of a device without bfloat16 units on which bfloat16 runs; empty where there is none.
        peak_bytes: Highest allocated bytes of the device, 0 where not measured.
        capacity_bytes: Memory of the device.
        recomputes: Whether the model checkpoints its activations.
        submit_s: Host time to give out forward and backward, per step; empty without a device of its own clock.
        device_s: Time of the device from the first of that work to the last, per step.
        sync_lines: Lines at which the host waited for the device in that stretch, and in how many steps.
        listened_steps: Steps in which such waits were listened for.
    """

    slots: deque[int] = field(default_factory=_series)
    real: deque[int] = field(default_factory=_series)
    longest: deque[int] = field(default_factory=_series)
    widths: deque[int] = field(default_factory=_series)
    step_s: deque[float] = field(default_factory=_series)
    gc_s: float = 0.0
    num_gc: int = 0
    num_empty_cache: int = 0
    data_s: float = 0.0
    num_eval_forwards: int = 0
    num_recomputed: int = 0
    compiled_at: list[int] = field(default_factory=list)
    num_paged_in: int = 0
    swap_bytes: int = 0
    emulated_bf16: str = ""
    peak_bytes: int = 0
    capacity_bytes: int = 0
    recomputes: bool = False
    submit_s: deque[float] = field(default_factory=_series)
    device_s: deque[float] = field(default_factory=_series)
    sync_lines: dict[str, int] = field(default_factory=dict)
    listened_steps: int = 0


def find_speed_faults(seen: SpeedEvidence) -> list[Finding]:
    """Return what is slow about a run; empty when nothing is."""
    findings = [
        _padding(seen),
        _garbage(seen),
        _empty_cache(seen),
        _evaluation(seen),
        _data(seen),
        _recompilation(seen),
        _swap(seen),
        _bf16(seen),
        _checkpointing(seen),
        _host(seen),
    ]
    return [finding for finding in findings if finding is not None]


def _padding(seen: SpeedEvidence) -> Finding | None:
    slots, real = sum(seen.slots), sum(seen.real)
    if len(seen.slots) < MIN_STEPS or not slots or not real or real / slots >= REAL_SHARE:
        return None
    rows = [slot / max(1, width) for slot, width in zip(seen.slots, seen.widths, strict=True)]
    dynamic = sum(count * longest for count, longest in zip(rows, seen.longest, strict=True))
    share, better = real / slots, real / max(1.0, dynamic)
    evidence = {"real_fraction": share, "dynamic_fraction": better, "num_slots": slots,
                "packing_speedup": slots / real, "dynamic_speedup": slots / max(1.0, dynamic)}  # fmt: skip
    packed = f"Packing leaves next to none: {slots / real:.1f} times fewer."
    if dynamic > 0.8 * slots:  # Already padded to the longest of each batch: its rows differ too much.
        return make_finding(
            "speed.padding",
            f"Only {100 * share:.0f} % of the {slots} token slots are real although each batch is padded to its own "
            f"longest row. {packed}",
            evidence=evidence,
            fixes=[Fix("Pack rows into full sequences.", {"data.packing": True}), Fix("Group rows of like length.")],
            confidence=0.9,
        )
    return make_finding(
        "speed.padding",
        f"Only {100 * share:.0f} % of the {slots} token slots are real. Padding per batch would make it "
        f"{100 * better:.0f} %: about {slots / dynamic:.1f} times fewer to compute. {packed}",
        evidence=evidence,
        confidence=0.95,
    )


def _garbage(seen: SpeedEvidence) -> Finding | None:
    total = float(sum(seen.step_s))
    if len(seen.step_s) < MIN_STEPS or seen.num_gc < 0.8 * len(seen.step_s) or not total or seen.gc_s < 0.05 * total:
        return None
    per_step = seen.gc_s / len(seen.step_s)
    return make_finding(
        "speed.gc_every_step",
        f"gc.collect() takes {1000 * per_step:.0f} ms of a {1000 * total / len(seen.step_s):.0f} ms step "
        f"({100 * seen.gc_s / total:.0f} %).",
        evidence={"gc_s_per_step": per_step, "num_calls": seen.num_gc},
        confidence=0.95,
    )


def _empty_cache(seen: SpeedEvidence) -> Finding | None:
    if len(seen.step_s) < MIN_STEPS or seen.num_empty_cache < 0.8 * len(seen.step_s):
        return None
    return make_finding(
        "speed.empty_cache_every_step",
        f"torch.cuda.empty_cache() ran {seen.num_empty_cache} times in {len(seen.step_s)} steps.",
        evidence={"num_calls": seen.num_empty_cache},
    )


def _evaluation(seen: SpeedEvidence) -> Finding | None:
    if not seen.num_recomputed:
        return None
    return make_finding(
        "speed.checkpointing_in_eval",
        f"Gradient checkpointing ran in {seen.num_eval_forwards} forward passes without gradients, "
        f"where it only costs.",
        evidence={"num_forwards": seen.num_eval_forwards, "num_checkpointed_layers": seen.num_recomputed},
    )


def _data(seen: SpeedEvidence) -> Finding | None:
    total = float(np.sum(seen.step_s))
    if len(seen.step_s) < 3 * MIN_STEPS or not total or seen.data_s < 0.4 * total or total / len(seen.step_s) < 0.02:
        return None
    return make_finding(
        "speed.data_wait",
        f"{100 * seen.data_s / total:.0f} % of the time passes between a step and the next forward "
        f"pass: steps wait for "
        "data.",
        evidence={"data_s": seen.data_s, "total_s": total},
        confidence=0.7,
    )


def _recompilation(seen: SpeedEvidence) -> Finding | None:
    # By step: a first evaluation may make many graphs, but all at once.
    late = {step for step in seen.compiled_at if step > SETTLED_STEP}
    if len(late) <= MAX_LATE_STEPS:
        return None
    widths = len(set(seen.widths))
    shapes = f" The batches had {widths} different lengths." if widths > 1 else ""
    return make_finding(
        "speed.recompilation",
        f"torch.compile went on to make graphs in {len(late)} steps after step {SETTLED_STEP}; at its limit it gives "
        f"up and runs uncompiled.{shapes}",
        evidence={"num_graphs": len(seen.compiled_at), "num_late_steps": len(late), "num_lengths": widths},
        fixes=[Fix("Pad lengths to multiples of 64, or pass dynamic=True to torch.compile.")],
        confidence=0.9,
    )


def _swap(seen: SpeedEvidence) -> Finding | None:
    steps = len(seen.step_s)
    if steps < MIN_STEPS or (seen.num_paged_in < PAGES_PER_STEP * steps and seen.swap_bytes < SWAPPED):
        return None
    moved = f"{format_bytes(seen.swap_bytes)} of this process went to swap" if seen.swap_bytes else "memory is short"
    return make_finding(
        "speed.swap",
        f"The system reads {seen.num_paged_in / steps:.0f} pages a step back from disk ({moved}): host memory is full.",
        evidence={"pages_per_step": seen.num_paged_in / steps, "swap_bytes": seen.swap_bytes},
        confidence=0.8,
    )


def _host(seen: SpeedEvidence) -> Finding | None:
    """Find a device that has nothing queued: its host waits for it in each step, or cannot keep up."""
    if len(seen.device_s) < MIN_STEPS or seen.listened_steps < MIN_STEPS:
        return None
    pairs = zip(seen.submit_s, seen.device_s, strict=True)
    share = float(np.median([host / device if device > 0 else 0.0 for host, device in pairs]))
    if share < NO_AHEAD:
        return None
    step_s = float(np.median(seen.device_s))
    evidence = {"submit_s": float(np.median(seen.submit_s)), "device_s": step_s, "num_steps": len(seen.device_s)}
    waits = {line: count for line, count in seen.sync_lines.items() if count >= WAITING_SHARE * seen.listened_steps}
    if waits:
        first = max(waits, key=lambda line: waits[line])
        others = f" and {len(waits) - 1} more lines" if len(waits) > 1 else ""
        return make_finding(
            "speed.sync_every_step",
            f"The host waits for the device within each step, at {first}{others}: in the {1000 * step_s:.1f} ms of "
            "forward and backward it never ran ahead, and the device stood idle after each wait.",
            where={"line": first},
            evidence=evidence | {"lines": tuple(sorted(waits)), "listened_steps": seen.listened_steps},
            confidence=0.8,
        )
    if seen.sync_lines:  # Waits that come and go: no verdict about the rest.
        return None
    return make_finding(
        "speed.host_bound",
        f"The device waits for the host: giving out forward and backward takes {1000 * evidence['submit_s']:.1f} ms "
        f"and the device is done with them after {1000 * step_s:.1f} ms, so that nothing is ever queued.",
        evidence=evidence,
        fixes=[
            Fix("Make the micro-batch larger and the accumulation smaller: the same launches do more work."),
            Fix("Compile the model, which launches less.", {"training.torch_compile": True}),
        ],
        confidence=0.8,
    )


def emulated_bf16(name: str) -> Finding:
    """Return the finding of a processor that computes bfloat16 without units for it."""
    return make_finding(
        "speed.emulated_bf16",
        f"{name} has no bfloat16 units: each product in bfloat16 converts its operands to float32 and back, which "
        "costs more than computing in float32.",
        where={"object": name},
        fixes=[Fix("Compute in float32 here.", {"training.mixed_precision": "no"})],
        confidence=0.8,
    )


def _bf16(seen: SpeedEvidence) -> Finding | None:
    if not seen.emulated_bf16:
        return None
    return make_finding(
        "speed.emulated_bf16",
        f"{seen.emulated_bf16} has no bfloat16 units: torch.cuda.is_bf16_supported() says yes, and emulates it.",
        fixes=[Fix("Use float16 with a gradient scaler, or float32.", {"training.mixed_precision": "fp16"})],
        confidence=0.95,
    )


def _checkpointing(seen: SpeedEvidence) -> Finding | None:
    if not seen.recomputes or not seen.capacity_bytes or not seen.peak_bytes or len(seen.step_s) < MIN_STEPS:
        return None
    if seen.peak_bytes > IDLE_SHARE * seen.capacity_bytes:
        return None
    return make_finding(
        "speed.checkpointing_unneeded",
        "Checkpointing runs each forward twice to save memory, and "
        f"{format_bytes(seen.capacity_bytes - seen.peak_bytes)} of {format_bytes(seen.capacity_bytes)} were never "
        "used.",
        evidence={"peak_bytes": seen.peak_bytes, "capacity_bytes": seen.capacity_bytes},
        confidence=0.6,
    )
