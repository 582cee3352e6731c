"""HTML of a run: its state, its newest figures, its result. Plain data in, escaped text out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol

from ..units import format_bytes, format_count, format_seconds
from .charts import format_value
from .text import STATE_LABELS, format_usd


class Figures(Protocol):
    """Newest figures of a run; None where there is none yet."""

    loss: float | None
    eval_loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    tokens_per_s: float | None
    memory_bytes: float | None
    seconds_per_step: float | None
    elapsed_s: float | None
    cost_usd: float | None
    usd_per_1000_tokens: float | None
    utilization_mean: float | None
    loss_drop_per_1000_tokens: float | None


def render_run_head(state: str, run_dir: str | None) -> str:
    """Return the state as a pill, spoken when it changes, and the run's folder."""
    where = f'<span class="wb-run-where">{escape(run_dir)}</span>' if run_dir else ""
    label = STATE_LABELS.get(state, state)
    return (
        f'<div class="wb-run-head"><span class="wb-pill wb-pill-{escape(state)}" role="status" aria-live="polite">'
        f"{escape(label)}</span>{where}</div>"
    )


def render_run_facts(figures: Figures) -> str:
    """Return the newest figures of a run as a row of small cells; empty before the first step."""
    cells: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("Loss", figures.loss, format_value),
        ("Held-out loss", figures.eval_loss, format_value),
        ("Gradient norm", figures.grad_norm, format_value),
        ("Learning rate", figures.learning_rate, format_value),
        ("Tokens/s", figures.tokens_per_s, format_count),
        ("Step", figures.seconds_per_step, format_seconds),
        ("Memory", figures.memory_bytes, format_bytes),
        ("Trained for", figures.elapsed_s, format_seconds),
        ("Utilization", figures.utilization_mean, _percent),
        ("Cost so far", figures.cost_usd, _dollars),
        ("Per 1M tokens", _times_1000(figures.usd_per_1000_tokens), _dollars),
        ("Loss drop per 1,000 tokens", figures.loss_drop_per_1000_tokens, format_value),
    ]
    shown = "".join(
        f'<div class="wb-fact"><span>{name}</span><b>{escape(form(value))}</b></div>'
        for name, value, form in cells
        if value is not None and math.isfinite(value)
    )
    return f'<div class="wb-facts wb-run-facts">{shown}</div>' if shown else ""


def _percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def _dollars(value: float) -> str:
    return f"${format_usd(value, value)}"


def _times_1000(value: float | None) -> float | None:
    return None if value is None else 1000 * value


def _plain(text: str, **values: object) -> str:
    return text.format(**values) if values else text


def render_samples(samples: Sequence[Mapping[str, Any]], say: Callable[..., str] = _plain) -> str:
    """Return what the model answered to each prompt, before the run beside now; empty without samples.

    Args:
        samples: Data of the run's ``samples`` events, oldest first.
        say: Translates the titles.
    """
    if not samples:
        return ""
    before, now = samples[0], samples[-1]
    # Asked again in the same order; a run that was stopped in the middle has answered fewer.
    pairs = list(zip(before["samples"], now["samples"], strict=False))
    rows = []
    for old, new in pairs:
        sides = [(say("Step {number}", number=before["step"]), old["answer"])]
        if now is not before:
            sides.append((say("Step {number}", number=now["step"]), new["answer"]))
        if new.get("wanted"):
            sides.append((say("The data says"), new["wanted"]))
        answers = "".join(
            f'<div class="wb-side"><div class="wb-side-head"><b>{escape(title)}</b></div>'
            f'<pre class="wb-answer" tabindex="0" aria-label="{escape(title)}">{escape(str(text))}</pre></div>'
            for title, text in sides
        )
        rows.append(
            f'<div class="wb-sample"><p>{escape(str(new["prompt"]))}</p><div class="wb-sides">{answers}</div></div>'
        )
    title = escape(say("What the model answers"))
    return (
        f'<section class="wb-samples" aria-label="{title}"><div class="wb-sub">{title}</div>{"".join(rows)}</section>'
    )


def render_result(state: str, position: str, loss: float | None, run_dir: Path, result_dir: Path | None) -> str:
    """Return what is left of a run: where it is saved and how to open it again."""
    tail = f", loss {format_value(loss)}" if loss is not None else ""
    kind = "bad" if state == "failed" else "good"
    if result_dir is not None:
        what = f"Saved in <code>{escape(str(result_dir))}</code>. "
    elif state == "failed":
        what = f"What was recorded until then is in <code>{escape(str(run_dir))}</code>. "
    else:
        what = ""
    label = STATE_LABELS.get(state, state)
    return (
        f'<div class="wb-note wb-note-{kind}"><b>{escape(label[:1].upper() + label[1:])}</b> at {escape(position)}'
        f"{escape(tail)}. {what}Open it again with <code>Workbench.open({escape(repr(str(run_dir)))})</code>.</div>"
    )
