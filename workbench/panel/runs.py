"""What a panel needs to know of a run, live or ended, as plain data. No widgets."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..diagnose import judge_memory
from ..errors import RunError
from ..observe.economy import measure_economy
from ..report.text import describe_run, describe_time_left
from ..train.process import live_session


def require_no_live_session() -> None:
    """Refuse a second run.

    Raises:
        RunError: A run is live; the message says which and how far it is.
    """
    session = live_session()
    if session is not None:
        facts = read_facts(session)
        raise RunError(
            f"A run is {facts.state} in this kernel ({session.run_dir}, {facts.position}); one kernel trains one run "
            "at a time. Stop it first, or start a second kernel with another run folder."
        )


@dataclass(frozen=True)
class EndedRun:
    """A run read back from its folder: what a panel needs in place of a session. It cannot be paused or stopped."""

    run_dir: Path
    recipe: Any
    history: Any
    state: str
    num_steps: int | None = None
    result_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Where a run stands.

    Attributes:
        state: One of RUN_STATES.
        step: Optimizer steps done.
        num_steps: Steps of the whole run, or None while it is not known.
        loss, learning_rate, grad_norm, tokens_per_s, eval_loss: Newest values; None before the first.
        memory_bytes: Highest bytes of the newest step.
        seconds_per_step: Median of the newest steps, or None.
        elapsed_s: Training time so far, or None.
        cost_usd, usd_per_1000_tokens, utilization_mean, loss_drop_per_1000_tokens: See ``observe.economy.Economy``.
    """

    state: str
    step: int = 0
    num_steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: float | None = None
    seconds_per_step: float | None = None
    elapsed_s: float | None = None
    cost_usd: float | None = None
    usd_per_1000_tokens: float | None = None
    utilization_mean: float | None = None
    loss_drop_per_1000_tokens: float | None = None

    @property
    def position(self) -> str:
        """Return e.g. ``"step 12 of 40"``."""
        return f"step {self.step} of {self.num_steps}" if self.num_steps else f"step {self.step}"

    @property
    def text(self) -> str:
        """One line for a person."""
        return describe_run(self.state, self.step, self.num_steps, self.loss)

    @property
    def time_left(self) -> str:
        """Return e.g. ``"about 3 min 20 s left"``, or nothing."""
        return describe_time_left(self.step, self.num_steps, self.seconds_per_step) if self.state == "running" else ""


def read_facts(session: Any) -> RunFacts:
    """Return where a session (or an EndedRun) stands, from its history."""
    history = getattr(session, "history", None)
    if history is None or not len(history):
        return RunFacts(state=session.state, num_steps=session.num_steps)
    step = _newest(history, "step") or 0
    times = history.column("step_s")[-25:]
    times = times[np.isfinite(times)]
    economy = measure_economy(history)
    return RunFacts(
        state=session.state,
        step=int(step),
        num_steps=session.num_steps,
        loss=_newest(history, "loss"),
        eval_loss=_newest(history, "eval_loss"),
        learning_rate=_newest(history, "learning_rate"),
        grad_norm=_newest(history, "grad_norm"),
        tokens_per_s=_newest(history, "tokens_per_s"),
        memory_bytes=_newest(history, "peak_allocated_bytes") or _newest(history, "allocated_bytes"),
        seconds_per_step=float(np.median(times)) if len(times) else None,
        elapsed_s=_newest(history, "elapsed_s"),
        cost_usd=economy.cost_usd,
        usd_per_1000_tokens=economy.usd_per_1000_tokens,
        utilization_mean=economy.utilization_mean,
        loss_drop_per_1000_tokens=economy.loss_drop_per_1000_tokens,
    )


def describe_leak(session: Any) -> tuple[str, str]:
    """Return the leak verdict's word and its sentence, which says what was watched; empty before the first step."""
    history = getattr(session, "history", None)
    if history is None or not len(history):
        return "too_early", ""
    judge = getattr(session, "leak_verdict", None)
    verdict = judge() if judge is not None else judge_memory(history, counter="allocated bytes")
    return verdict.verdict, verdict.text


def list_findings(session: Any) -> list[dict[str, Any]]:
    """Return what the doctors found as plain values, leaks excepted: they have their own line."""
    found = [finding.to_dict() for finding in getattr(session, "findings", ())]
    if isinstance(session, EndedRun):
        found = [data for _, data in _read_lines(session.run_dir / "findings.jsonl")]
    return [one for one in found if one.get("kind") != "leak" and one.get("is_fault", True)]


def list_samples(session: Any) -> list[Mapping[str, Any]]:
    """Return what the model answered before the run and at its checkpoints, oldest first."""
    if isinstance(session, EndedRun):
        return [data for kind, data in _read_lines(session.run_dir / "events.jsonl") if kind == "samples"]
    return list(getattr(session, "samples", ()))


def read_failure(session: Any) -> tuple[str, str] | None:
    """Return the sentence and the traceback of a failed run, or None."""
    if isinstance(session, EndedRun):
        errors = [data for kind, data in _read_lines(session.run_dir / "events.jsonl") if kind == "error"]
        if session.state != "failed" or not errors:
            return None
        return str(errors[-1].get("sentence", "")), str(errors[-1].get("traceback", ""))
    if session.error is None:
        return None
    return str(session.summary()["error"]), session.error_traceback


def _read_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return ``(kind, data)`` of the lines of an events file; half-written ones are left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            event = json.loads(line)
            found.append((str(event["kind"]), dict(event["data"])))
    return found


def _newest(history: Any, name: str) -> float | None:
    """Return the newest finite value among the last rows, or None."""
    for value in history.column(name)[:-200:-1]:
        if math.isfinite(value):
            return float(value)
    return None


def open_run(run_dir: str | Path) -> Any:
    """Return the live session of this folder, or the run read back from it.

    Raises:
        RunFolderError: It is no run folder, or cannot be read.
    """
    from ..observe.history import History
    from ..train.run_folder import read_recipe_of, summarise_run

    live = live_session()
    if live is not None and Path(live.run_dir).resolve() == Path(run_dir).resolve():
        return live
    recipe = read_recipe_of(run_dir)
    summary = summarise_run(run_dir)
    planned = sum(recipe.phases.steps) or recipe.training.max_steps
    return EndedRun(
        run_dir=Path(run_dir),
        recipe=recipe,
        history=History.from_folder(run_dir),
        state=summary.state,
        result_dir=next((found for name in ("adapter", "model") if (found := Path(run_dir) / name).is_dir()), None),
        num_steps=planned if planned > 0 else None,
    )
