"""The same run with other settings, side by side: estimated, or also trained one after the other."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import Problem, RecipeError, WorkbenchError
from ..estimate import BatchShape, Estimate, estimate_run
from ..events import Cancel, Event, Observer, Progress, ProgressCallback
from ..hardware import Device, target_device
from ..recipe import Recipe, field_info

# More variants than a person reads; most likely a slip of the hand.
MAX_VARIANTS = 64

# The table that every course on fine-tuning shows.
METHODS: dict[str, dict[str, Any]] = {
    "full": {"adapter.method": "none", "training.gradient_checkpointing": False},
    "LoRA": {"adapter.method": "lora", "training.gradient_checkpointing": False},
    "LoRA + checkpointing": {"adapter.method": "lora", "training.gradient_checkpointing": True},
    "QLoRA + checkpointing": {
        "adapter.method": "lora",
        "quantization.load_in_4bit": True,
        "training.gradient_checkpointing": True,
    },
}

ENDED = ("done", "stopped", "failed")

# Steps in which memory is still being taken and caches are cold; the median leaves them out where there are others.
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Measured:
    """What a variant's real run took.

    Attributes:
        peak_bytes: Highest allocated bytes of a step (heap bytes on a CPU), or None where nothing measured them.
        step_s: Median seconds of a step.
        tokens_per_s: Real tokens by seconds, over the steps that count.
        first_loss, last_loss: Means over the first and the last fifth of the steps.
        eval_loss: Loss on the held-out rows at the end, or None.
        eval_accuracy: Accuracy on them, of classifiers.
        cost_usd_per_1000_tokens: ``(low, high)``, or None where no price is known.
        run_dir: Its folder.
    """

    peak_bytes: float | None
    step_s: float
    tokens_per_s: float
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    eval_accuracy: float | None
    cost_usd_per_1000_tokens: tuple[float, float] | None
    run_dir: str


@dataclass(frozen=True)
class ComparedRun:
    """One row of a comparison.

    Attributes:
        name: E.g. ``"LoRA"`` or ``"adapter.r=8"``.
        changes: ``{field: value}`` against the Recipe that was compared.
        problem: Why this variant cannot be estimated or run, or None.
        estimate: Its estimate, or None.
        measured: Its run, or None.
    """

    name: str
    changes: Mapping[str, Any]
    problem: str | None = None
    estimate: Estimate | None = None
    measured: Measured | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values; estimates without their timelines."""
        return {
            "name": self.name,
            "changes": dict(self.changes),
            "problem": self.problem,
            "estimate": self.estimate.to_dict() if self.estimate else None,
            "measured": asdict(self.measured) if self.measured else None,
        }


@dataclass
class _Progress:
    """Shares one progress bar among the variants."""

    callback: ProgressCallback | None
    total: int
    done: int = 0
    name: str = field(default="")

    def on_event(self, event: Event) -> None:
        if event.kind == "step":
            self.tell(f"{self.name}: step {int(event.data['step'])}")

    def tell(self, message: str) -> None:
        if self.callback is not None:
            self.callback(Progress("compare", self.done, self.total, message))


def variants_over(choices: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Return ``{name: changes}`` for every combination of the values of some fields.

    Args:
        choices: ``{field: values}``; text values are read as YAML would read them.

    Raises:
        RecipeError: An unknown field, a wrong value, or more than 64 combinations.

    Example:
        >>> variants_over({"adapter.r": ["8", "16"]})
        {'adapter.r=8': {'adapter.r': 8}, 'adapter.r=16': {'adapter.r': 16}}
    """
    problems: list[Problem] = []
    parsed: dict[str, list[Any]] = {}
    for path, values in choices.items():
        try:
            info = field_info(path)
            parsed[path] = [info.parse(value) if isinstance(value, str) else value for value in values]
        except RecipeError as error:
            problems.extend(error.problems)
    if not problems and math.prod(len(values) for values in parsed.values()) > MAX_VARIANTS:
        problems.append(
            Problem(next(iter(parsed)), f"more than {MAX_VARIANTS} combinations; give fewer fields or values.")
        )
    if problems:
        raise RecipeError(problems)
    combinations = itertools.product(*parsed.values())
    changes = [dict(zip(parsed, values, strict=True)) for values in combinations]
    return {", ".join(f"{path}={value}" for path, value in one.items()): one for one in changes}


def compare_recipes(
    recipe: Recipe,
    variants: Mapping[str, Mapping[str, Any]],
    device: Device | None = None,
    *,
    shape: Callable[[Recipe], BatchShape | None] | None = None,
    train: bool = False,
    run_root: str | Path | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> list[ComparedRun]:
    """Estimate variants of a Recipe, and train them one after the other where asked for.

    A variant that is not allowed, or whose run fails, becomes a row with the reason; the others go on.

    Args:
        recipe: The Recipe that the changes are against.
        variants: ``{name: changes}``, e.g. ``METHODS`` or from ``variants_over``.
        device: The device to estimate for; None takes the Recipe's.
        shape: Returns the batches of a variant's data; None assumes that every sample fills ``max_length``.
        train: Also run each variant on this machine.
        run_root: Where the runs' folders go; None takes ``./runs``.
        progress: Told about the stage ``"compare"``.
        cancel: Stops between variants, and stops the run that is live.

    Returns:
        One row a variant, in their order.

    Raises:
        Cancelled: The user cancelled; runs that ended are in their folders.
    """
    told = _Progress(progress, len(variants))
    rows = []
    for number, (name, changes) in enumerate(variants.items()):
        told.done, told.name = number, name
        told.tell(name)
        if cancel is not None:
            cancel.check()
        problem, estimate, measured = None, None, None
        try:
            variant = recipe.with_changes(changes)
            batch = shape(variant) if shape is not None else None
            estimate = estimate_run(variant, device or target_device(variant), shape=batch, cancel=cancel)
            if train:
                measured = _train(variant, run_root, told, cancel)
        except RecipeError as error:
            problem = "; ".join(str(one) for one in error.problems)
        except WorkbenchError as error:
            if cancel is not None:
                cancel.check()
            problem = str(error)
        rows.append(ComparedRun(name, dict(changes), problem, estimate, measured))
    told.done = len(variants)
    told.tell("done")
    return rows


def _train(recipe: Recipe, run_root: str | Path | None, observer: Observer, cancel: Cancel | None) -> Measured:
    from ..train.run_folder import new_path
    from .run import start_session

    run_dir = new_path(recipe, run_root) if run_root is not None else None
    session = start_session(recipe, run_dir=run_dir, observers=[observer])
    while session.wait(timeout_s=0.5).state not in ENDED:
        if cancel is not None and cancel.is_set:
            session.stop(save=True)
    if cancel is not None:
        cancel.check()
    return measure_history(session.history, str(session.run_dir), target_device(recipe).price_per_hour_usd, recipe)


def measure_history(history: Any, run_dir: str, prices: tuple[float, float] | None, recipe: Recipe) -> Measured:
    """Return what a run took from its history.

    Args:
        history: A ``History``.
        run_dir: Its folder.
        prices: ``(low, high)`` US dollars an hour of the device, or None; the Recipe's own price goes before.
        recipe: The run's settings.
    """
    step_s = _finite(history.column("step_s"))
    tokens = [float(value) for value in history.column("num_tokens")]
    counted = slice(WARM_UP_STEPS, None) if len(step_s) > 2 * WARM_UP_STEPS else slice(None)
    seconds = sum(step_s[counted])
    tokens_per_s = sum(value for value in tokens[counted] if math.isfinite(value)) / seconds if seconds else 0.0
    own = recipe.cost.price_per_hour_usd
    low_high = (own, own) if own is not None else prices
    cost = None
    if low_high is not None and tokens_per_s:
        cost = (low_high[0] / 3.6 / tokens_per_s, low_high[1] / 3.6 / tokens_per_s)
    losses = _finite(history.column("loss"))
    fifth = max(1, len(losses) // 5)
    peaks = _finite(history.column("peak_allocated_bytes"))
    return Measured(
        peak_bytes=max(peaks) if peaks else None,
        step_s=statistics.median(step_s[counted]) if step_s else 0.0,
        tokens_per_s=tokens_per_s,
        first_loss=statistics.fmean(losses[:fifth]) if losses else None,
        last_loss=statistics.fmean(losses[-fifth:]) if losses else None,
        eval_loss=history.last("eval_loss"),
        eval_accuracy=history.last("eval_accuracy"),
        cost_usd_per_1000_tokens=cost,
        run_dir=run_dir,
    )


def _finite(values: Any) -> list[float]:
    return [float(value) for value in values if math.isfinite(value)]
