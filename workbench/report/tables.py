"""Text for terminals and for outputs without widgets: estimates, plans, runs. Plain data in, a string out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..estimate.estimate import VERDICT_TEXTS, Estimate
from ..units import format_bytes, format_count, format_seconds
from .text import describe_bound, describe_cost, fragmentation_sentences

if TYPE_CHECKING:
    from ..plan import Plan
    from ..train.run_folder import RunSummary

BAR_WIDTH = 40


def render_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a text table; columns of numbers stand to the right."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    right = [
        all(row[column][:1].isdigit() or row[column][:1] in "+-" for row in cells[1:]) for column in range(len(header))
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def render_estimate(estimate: Estimate) -> str:
    """Return an estimate as a few lines: verdict, memory by category, step time, what was assumed."""
    memory, step_time = estimate.memory, estimate.time
    lines = [
        estimate.verdict_sentence(),
        f"Parameters: {format_count(estimate.num_parameters)}, "
        f"{format_count(estimate.num_trainable_parameters)} train "
        f"({estimate.num_trainable_parameters / max(1, estimate.num_parameters):.2%}).",
        "",
    ]
    total = max(memory.capacity_bytes, memory.process_bytes)
    parts = sorted(memory.breakdown.items(), key=lambda item: -item[1])
    width = max(len(name) for name, _ in parts)
    for name, num_bytes in parts:
        bar = "█" * max(1 if num_bytes else 0, round(BAR_WIDTH * num_bytes / total))
        lines.append(f"  {name.replace('_', ' '):<{width}}  {format_bytes(num_bytes):>9}  {bar}")
    lines += [
        "",
        f"Allocated {format_bytes(memory.peak_allocated_bytes)}, reserved {format_bytes(memory.peak_reserved_bytes)}, "
        f"at rest {format_bytes(memory.rest_bytes)}.",
        *fragmentation_sentences(memory),
        estimate.step_sentence(),
    ]
    bound = describe_bound(step_time)
    if bound:
        lines.append(bound)
    if step_time.epoch_s is not None:
        lines.append(f"Epoch: {format_seconds(step_time.epoch_s)}.")
    if step_time.total_s is not None:
        lines.append(f"Run: {step_time.num_steps} steps, {format_seconds(step_time.total_s)}.")
    cost = describe_cost(step_time)
    if cost:
        lines.append(f"Cost: {cost}.")
    lines += [f"Note: {note}" for note in estimate.notes]
    return "\n".join(lines)


def render_plan(plan: Plan) -> str:
    """Return the effect of every toggle, and the changes that make the run fit."""
    rows = [
        (
            effect.field,
            effect.value,
            _signed(effect.memory_delta_bytes, format_bytes),
            _signed(effect.step_delta_s, format_seconds),
            VERDICT_TEXTS[effect.verdict],
        )
        for effect in plan.effects
    ]
    text = render_table(("field", "value", "memory", "step", "then"), rows)
    return "\n".join([text, *map(str, plan.options)])


def render_runs(runs: Sequence[RunSummary]) -> str:
    """Return one line a run."""
    rows = [
        (
            run.name,
            run.state,
            run.num_steps_done,
            "" if run.loss is None else f"{run.loss:.4f}",
            run.model,
            format_bytes(run.num_bytes),
        )
        for run in runs
    ]
    return render_table(("run", "state", "steps", "loss", "model", "on disk"), rows)


def _signed(value: float, render: Any) -> str:
    return "+" + render(value) if value > 0 else render(value)
