"""Pieces of HTML from plain data. Every text that comes from data, models or exceptions is escaped here.

Classes begin with ``wb-``; the panel's style sheet gives them their looks, and without it they still read in order.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from html import escape
from typing import Protocol

from ..errors import Cancelled, RecipeError, RunError, WorkbenchError
from ..estimate.estimate import VERDICT_TEXTS, Estimate, TimeEstimate
from ..events import MEMORY_CATEGORIES
from ..plan.plan import PlanOption
from ..units import format_bytes, format_count, format_seconds
from .charts import CATEGORY_COLOURS, render_memory_bar
from .text import CATEGORY_LABELS, LIMIT_NAMES, NO_EFFECT, VERDICT_SIGNS, describe_effect, format_range, format_usd

BASIS_TEXTS: dict[str, str] = {
    "table": "from the device table",
    "calibrated": "this device was measured",
    "anchored": "a step of this run was measured",
}


class Effect(Protocol):
    """What is needed of a toggle's effect to show it."""

    value: object
    memory_delta_bytes: int
    step_delta_s: float | None
    verdict: str


def render_estimate(estimate: Estimate) -> str:
    """Return the whole estimate: verdict in words, bar, legend, figures and notes."""
    memory, time = estimate.memory, estimate.time
    low, high = memory.interval_bytes
    verdict = (
        f'<div class="wb-verdict wb-verdict-{memory.verdict}" role="status">'
        f'<span class="wb-verdict-word"><span aria-hidden="true">{VERDICT_SIGNS[memory.verdict]}</span> '
        f"{VERDICT_TEXTS[memory.verdict]}</span>"
        f'<span class="wb-verdict-figures"><b>{format_bytes(memory.process_bytes)}</b> of '
        f"{format_bytes(memory.capacity_bytes)}</span></div>"
    )
    legend = "".join(
        f'<li><i class="wb-dot" style="background:{CATEGORY_COLOURS[name]}"></i>'
        f"<span>{CATEGORY_LABELS[name]}</span><b>{format_bytes(memory.breakdown[name])}</b></li>"
        for name in MEMORY_CATEGORIES
        if memory.breakdown.get(name, 0) > 0
    )
    peak = memory.peak_phase + (f", step {memory.peak_step + 1}" if memory.peak_step is not None else "")
    facts = [
        ("Peak", peak, f"{format_bytes(memory.peak_allocated_bytes)} allocated"),
        ("Range", format_range(low, high, format_bytes), "of what the process takes"),
        (
            "Step",
            format_seconds(time.step_s),
            format_range(*time.interval_s, format_seconds),
        ),
        ("Speed", f"{format_count(time.tokens_per_s)} tokens/s", BASIS_TEXTS.get(time.basis, time.basis)),
        *_bound_fact(time),
        _total_fact(estimate),
        *_price_fact(time),
        (
            "Trains",
            f"{format_count(estimate.num_trainable_parameters)} of {format_count(estimate.num_parameters)}",
            "parameters",
        ),
    ]
    cells = "".join(
        f'<div class="wb-fact"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>'
        for name, value, more in facts
    )
    return (
        f'<div class="wb-estimate" data-recipe="{escape(estimate.recipe_digest)}">{verdict}'
        f"{render_memory_bar(memory.breakdown, memory.capacity_bytes, memory.interval_bytes)}"
        f'<ul class="wb-legend">{legend}</ul><div class="wb-facts">{cells}</div>{render_notes(estimate.notes)}</div>'
    )


def _bound_fact(time: TimeEstimate) -> list[tuple[str, str, str]]:
    total = sum(time.seconds_by_limit.values())
    if not total:
        return []
    ordered = sorted(time.seconds_by_limit.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{seconds / total:.0%} {LIMIT_NAMES.get(name, name)}" for name, seconds in ordered if seconds > 0
    )
    return [("Bound by", LIMIT_NAMES.get(time.bound_by, time.bound_by), shares)]


def _price_fact(time: TimeEstimate) -> list[tuple[str, str, str]]:
    if time.cost_usd_per_1000_tokens is None:
        return []
    low, high = time.cost_usd_per_1000_tokens
    return [("Price", f"${format_usd(low * 1000, high * 1000)}", f"per 1M tokens; {format_usd(low, high)} per 1,000")]


def _total_fact(estimate: Estimate) -> tuple[str, str, str]:
    time = estimate.time
    if time.total_s is None:
        return ("Whole run", "not known", "set max steps, or preview the data")
    more = f"{time.num_steps} steps" if time.num_steps else ""
    if time.epoch_s is not None:
        more += f", {format_seconds(time.epoch_s)} per epoch"
    if time.cost_usd:
        more += f", ${format_usd(*time.cost_usd)}"
    return ("Whole run", format_seconds(time.total_s), more)


def render_notes(notes: Sequence[str]) -> str:
    """Return sentences as a folded list; empty when there are none."""
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    count = f"{len(notes)} note{'s' if len(notes) > 1 else ''}"
    return f'<details class="wb-notes"><summary>{count} on this estimate</summary><ul>{items}</ul></details>'


def render_effects(effects: Sequence[Effect], words: Sequence[str], current_verdict: str) -> str:
    """Return what the other values of one field would do: one in sight, the others behind a fold.

    Args:
        effects: One per other value, in the order they should be read.
        words: What each value is called.
        current_verdict: Verdict as it stands; a change of it is said in words.
    """
    chips = []
    for effect, word in zip(effects, words, strict=True):
        text = describe_effect(effect.memory_delta_bytes, effect.step_delta_s)
        turn = f" → {VERDICT_TEXTS.get(effect.verdict, effect.verdict)}" if effect.verdict != current_verdict else ""
        kind = "same"
        if text != NO_EFFECT:
            kind = "less" if effect.memory_delta_bytes < 0 else "more" if effect.memory_delta_bytes > 0 else "same"
        line = f"{word}: {text}{turn}"
        chips.append(f'<span class="wb-chip wb-chip-{kind}" title="{escape(line)}">{escape(line)}</span>')
    if len(chips) < 2:
        return "".join(chips)
    rest = "".join(chips[1:])
    return (
        f'<details class="wb-chips"><summary>{chips[0]}<span class="wb-chip-rest">+{len(chips) - 1}</span></summary>'
        f"{rest}</details>"
    )


def render_option(changes: str, option: PlanOption) -> str:
    """Return one way to make a run fit: what to change, what it then takes, and what it alters."""
    alters = f"; {'; '.join(option.alters)}" if option.alters else "; the run learns the same"
    return (
        f'<div class="wb-option"><b>{escape(changes)}</b><span>{escape(VERDICT_TEXTS[option.verdict])} with '
        f"{format_bytes(option.process_bytes)}, {format_seconds(option.step_s)} per step{escape(alters)}</span></div>"
    )


def render_failure(sentence: str, traceback_text: str, what: str = "") -> str:
    """Return a failure that is known by its words only, with the traceback folded away."""
    lead = f"<b>{escape(what)}.</b> " if what else ""
    fold = _fold_traceback(traceback_text)
    return f'<div class="wb-alert" role="alert">{lead}<span>{escape(sentence)}</span>{fold}</div>'


def render_error(error: BaseException, what: str = "") -> str:
    """Return an error in words, with the traceback folded away.

    Args:
        error: What was raised; the cause of a RunError is shown in its place where it says more.
        what: What was being done, e.g. ``"The estimate failed"``.
    """
    lead = f"<b>{escape(what)}.</b> " if what else ""
    if isinstance(error, RecipeError):
        items = "".join(f"<li>{escape(str(problem))}</li>" for problem in error.problems)
        return f'<div class="wb-alert" role="alert">{lead}<ul>{items}</ul></div>'
    is_plain = isinstance(error, Cancelled) or error.__traceback__ is None
    text = "" if is_plain else "".join(traceback.format_exception(error))
    return render_failure(describe_error(error), text, what)


def describe_error(error: BaseException) -> str:
    """Return an exception as a sentence; foreign ones with their type and first lines."""
    cause = error.__cause__
    if isinstance(error, RunError) and cause is not None and not str(error).strip():
        error = cause
    if isinstance(error, WorkbenchError):
        return str(error)
    lines = str(error).strip().splitlines()[:3]
    return f"{type(error).__name__}: {' '.join(lines)}" if lines else type(error).__name__


def _fold_traceback(text: str) -> str:
    if not text.strip():
        return ""
    return f"<details><summary>Traceback, for a bug report</summary><pre>{escape(text[-12000:])}</pre></details>"
