"""Sentences from plain data: what an estimate, a toggle and a run say in words. No decisions are made here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..estimate.estimate import VERDICT_TEXTS, Estimate, MemoryEstimate, TimeEstimate
from ..units import MIB, format_bytes, format_count, format_seconds

CATEGORY_LABELS: dict[str, str] = {
    "parameter": "weights",
    "optimizer_state": "optimizer state",
    "gradient": "gradients",
    "activation": "activations",
    "autograd_detail": "autograd details",
    "input": "inputs",
    "temporary": "temporary",
    "workspace": "workspaces",
    "cached": "cached, fragmented",
    "context": "process and driver",
}

STATE_LABELS: dict[str, str] = {
    "idle": "not started",
    "preparing": "preparing",
    "running": "running",
    "pausing": "pausing",
    "paused": "paused",
    "stopping": "stopping",
    "stopped": "stopped",
    "done": "done",
    "failed": "failed",
}

NO_EFFECT = "no effect"

VERDICT_SIGNS: dict[str, str] = {"fits": "✓", "tight": "≈", "does_not_fit": "✕"}


def describe_verdict(estimate: Estimate) -> str:
    """Return the verdict with its figures, e.g. ``"fits: 1.9 GiB of 15 GiB (1.7 to 2.2 GiB)"``."""
    memory = estimate.memory
    low, high = memory.interval_bytes
    return (
        f"{VERDICT_TEXTS[memory.verdict]}: {format_bytes(memory.process_bytes)} of "
        f"{format_bytes(memory.capacity_bytes)} ({format_bytes(low)} to {format_bytes(high)})"
    )


def describe_estimate(estimate: Estimate) -> str:
    """Return the estimate in one line for terminals and screen readers."""
    time = estimate.time
    return (
        f"Estimated for {estimate.device_name}: {describe_verdict(estimate)}, peak in {estimate.memory.peak_phase}, "
        f"{format_seconds(time.step_s)} per step, {format_count(time.tokens_per_s)} tokens/s"
    )


LIMIT_TEXTS: dict[str, str] = {
    "compute": "computes",
    "bandwidth": "moves data between memory and cores",
    "launch": "waits for operators to be launched",
}
LIMIT_NAMES: dict[str, str] = {"compute": "arithmetic", "bandwidth": "memory bandwidth", "launch": "launches"}
BOUND_TEXTS: dict[str, str] = {
    "compute": "Bound by arithmetic",
    "bandwidth": "Bound by memory bandwidth",
    "launch": "Bound by the host, which launches the operators",
}


def describe_bound(time: TimeEstimate) -> str:
    """Return what bounds a step, e.g. ``"Bound by arithmetic: of a step 71 % computes, 29 % moves data ..."``."""
    total = sum(time.seconds_by_limit.values())
    if not total or time.bound_by not in BOUND_TEXTS:
        return ""
    ordered = sorted(time.seconds_by_limit.items(), key=lambda item: -item[1])
    shares = [f"{seconds / total:.0%} {LIMIT_TEXTS.get(name, name)}" for name, seconds in ordered if seconds > 0]
    return f"{BOUND_TEXTS[time.bound_by]}: of a step {', '.join(shares)}.".replace("%", " %")


def format_usd(low: float, high: float) -> str:
    """Return a range of prices, e.g. ``"0.42 to 1.3"``; one figure where both are written the same."""
    first, last = (_usd(usd) for usd in (low, high))
    return first if first == last else f"{first} to {last}"


def _usd(usd: float) -> str:
    """Return a price with two decimals, or with as many as its first two figures need; never as a power of ten."""
    if usd <= 0 or usd >= 0.1:
        return f"{usd:,.2f}"
    return f"{usd:.{1 - math.floor(math.log10(usd))}f}"


def describe_cost(time: TimeEstimate) -> str:
    """Return what a run costs, e.g. ``"0.42 to 1.30 USD for the run, 0.15 USD per 1M tokens"``; empty if not known."""
    parts = []
    if time.cost_usd is not None:
        parts.append(f"{format_usd(*time.cost_usd)} USD for the run")
    if time.cost_usd_per_1000_tokens is not None:
        low, high = time.cost_usd_per_1000_tokens
        parts.append(f"{format_usd(low, high)} USD per 1,000 tokens ({format_usd(low * 1000, high * 1000)} per 1M)")
    return ", ".join(parts)


def economy_lines(economy: Mapping[str, float | None], gradient_error: float | None = None) -> list[str]:
    """Return what a run costs, how busy its device is and what it learns per token; what is not known is left out.

    Args:
        economy: The fields of ``observe.economy.Economy``.
        gradient_error: Measured at the start of a run that compresses activations.
    """
    lines = []
    cost, rate = economy.get("cost_usd"), economy.get("usd_per_1000_tokens")
    if cost is not None and rate is not None:
        lines.append(f"cost: {_usd(cost)} USD, {_usd(rate)} USD per 1,000 tokens ({_usd(rate * 1000)} per 1M)")
    mean, spread = economy.get("utilization_mean"), economy.get("utilization_std")
    if mean is not None and spread is not None:
        lines.append(f"utilization: {mean:.0%}, standard deviation {spread:.1%} from step to step".replace("%", " %"))
    gain = economy.get("loss_drop_per_1000_tokens")
    if gain is not None:
        lines.append(f"progress: the loss falls by {gain:.3g} per 1,000 learned tokens over the last steps")
    if gradient_error is not None:
        lines.append(f"compressed activations: gradients are off by {gradient_error:.2%}".replace("%", " %"))
    return lines


def describe_effect(memory_delta_bytes: float, step_delta_s: float | None) -> str:
    """Return what a change does, e.g. ``"−1.2 GiB · +30 ms"``; ``"no effect"`` below 1 MiB and 10 µs."""
    parts = []
    if abs(memory_delta_bytes) >= MIB:
        parts.append(signed(memory_delta_bytes, format_bytes))
    if step_delta_s is not None and abs(step_delta_s) >= 1e-5:
        parts.append(signed(step_delta_s, format_seconds))
    return " · ".join(parts) if parts else NO_EFFECT


def signed(value: float, form: Callable[[float], str]) -> str:
    """Return ``form(abs(value))`` with a typographic plus or minus."""
    return f"{'−' if value < 0 else '+'}{form(abs(value))}"


def format_range(low: float, high: float, form: Callable[[float], str]) -> str:
    """Return two values as ``"2.4 to 3 GiB"``; the unit is written once where it is the same."""
    first, last = form(low), form(high)
    number, _, unit = first.rpartition(" ")
    is_same = number and " " not in number and last.endswith(f" {unit}")
    return f"{number if is_same else first} to {last}"


def describe_run(state: str, step: int, num_steps: int | None, loss: float | None) -> str:
    """Return one line on a run, e.g. ``"Fine-tuning panel: running, step 12 of 40, loss 2.31"``."""
    of = f" of {num_steps}" if num_steps else ""
    tail = f", loss {loss:.4g}" if loss is not None and math.isfinite(loss) else ""
    position = f", step {step}{of}" if step or num_steps else ""
    return f"Fine-tuning panel: {STATE_LABELS.get(state, state)}{position}{tail}"


def describe_time_left(step: int, num_steps: int | None, seconds_per_step: float | None) -> str:
    """Return e.g. ``"about 3 min 20 s left"``; empty while it is not known."""
    if not num_steps or not seconds_per_step or step >= num_steps or not math.isfinite(seconds_per_step):
        return ""
    return f"about {format_seconds((num_steps - step) * seconds_per_step)} left"


def describe_breakdown(breakdown: Mapping[str, int]) -> str:
    """Return the categories at the peak, largest first, e.g. ``"weights 270 MiB, activations 120 MiB"``."""
    ordered = sorted(breakdown.items(), key=lambda item: -item[1])
    return ", ".join(f"{CATEGORY_LABELS.get(name, name)} {format_bytes(size)}" for name, size in ordered if size > 0)


def fragmentation_sentences(memory: MemoryEstimate) -> list[str]:
    """Return what is unused when most is reserved, why, and on how small a device the run survives all the same."""
    sentences = []
    if memory.fragmentation_bytes:
        sentences.append(
            f"When most is reserved, {format_bytes(memory.fragmentation_bytes)} of it is in no use: "
            f"{memory.fragmentation_cause}"
        )
    if memory.smallest_capacity_bytes is not None:
        sentences.append(
            f"The smallest device it survives on has {format_bytes(memory.smallest_capacity_bytes)}; below "
            f"{format_bytes(memory.process_bytes)} the allocator gives back what it caches, which takes time."
        )
    return sentences
