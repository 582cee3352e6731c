"""A dry step: the longest batch, twice, with its update, an evaluation and a save, before a run is trusted with hours.

The estimate predicts all of these; the dry step does them, in seconds, and compares. Nothing of it stays: its run
folder is temporary, and the weights are dropped with it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..diagnose.finding import Finding
from ..errors import EstimateError, ModelError, RecipeError
from ..events import Cancel, Observer, ProgressCallback
from ..hardware import Device, read_device
from ..observe.meters import choose_meter
from ..recipe import Recipe
from ..units import format_bytes, format_seconds
from .run import WatchedSession

# Adam makes its state in the first update, after the activations of the first backward are gone: the peak of a run
# usually falls into its second step.
DRY_STEPS = 2


@dataclass(frozen=True)
class DryStepReport:
    """What the dry step found.

    Attributes:
        fits: Whether all of it had room.
        measured_bytes: Highest memory measured, less what the process held before; None where nothing was measured.
        predicted_bytes: What the estimate says for the same; None where it says nothing.
        capacity_bytes: What the device has.
        step_s: Seconds of the second step; None where it was not reached.
        num_tokens: Token slots of the batch.
        finding: What is wrong; None where all is well.
        text: One or two sentences for a person.
    """

    fits: bool
    measured_bytes: int | None
    predicted_bytes: int | None
    capacity_bytes: int
    step_s: float | None
    num_tokens: int
    finding: Finding | None
    text: str


class DryStep(WatchedSession):
    """A session over the longest samples; ``start``, ``stop`` and ``wait`` as for any other."""

    def __init__(self, recipe: Recipe, *, device: Device | None = None, observers: Sequence[Observer] = ()) -> None:
        """Make a dry step of a Recipe; nothing happens before ``start``.

        Args:
            recipe: The settings to try.
            device: The device to run on; None reads this machine's.
            observers: Receive every event.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="workbench-dry-")
        short = recipe.with_changes(
            {
                "training.max_steps": DRY_STEPS,
                "training.save_steps": 0,
                "training.report_to": (),
                "evaluation.eval_steps": 0,
                "evaluation.early_stopping_patience": None,
                "evaluation.load_best_model_at_end": False,
            }
        )
        here = device or read_device(recipe.hardware.device)
        super().__init__(
            short,
            device=here,
            meter=choose_meter(short, here),
            observers=observers,
            run_dir=Path(self._folder.name) / "run",
        )
        self._tried = recipe
        self._num_tokens = 0

    def _build(self, device: Device) -> Any:
        run = super()._build(device)
        training, evaluation = self.recipe.training, self.recipe.evaluation
        train, self._num_tokens = _longest(
            run.data.train, training.per_device_train_batch_size, DRY_STEPS * training.effective_batch_size
        )
        held_out = run.data.evaluation
        if held_out is not None:
            size = min(len(held_out), evaluation.per_device_eval_batch_size)
            held_out, _ = _longest(held_out, size, size)
        return dataclasses.replace(run, data=dataclasses.replace(run.data, train=train, evaluation=held_out))

    def close(self) -> None:
        """Remove what it wrote."""
        self._folder.cleanup()

    def report(self) -> DryStepReport:
        """Return what was found; when it has ended."""
        finding = next((one for one in reversed(self.findings) if one.kind == "oom"), None)
        step_s = self.history.column("step_s")
        measured, predicted = self._measured(), self._predicted()
        fits = self.state == "done"
        report = DryStepReport(
            fits=fits,
            measured_bytes=measured,
            predicted_bytes=predicted,
            capacity_bytes=self._target.capacity_bytes,
            step_s=float(step_s[-1]) if len(step_s) >= DRY_STEPS else None,
            num_tokens=self._num_tokens,
            finding=finding,
            text="",
        )
        return dataclasses.replace(report, text=self._text(report))

    def _text(self, report: DryStepReport) -> str:
        if not report.fits:
            if report.finding is None:
                return self.failure_text() or f"The dry step was {self.state}."
            return f"{report.finding.summary} {report.finding.fixes[0].text}"
        parts = [f"The longest batch ({report.num_tokens} token slots), its update, an evaluation and a save have room"]
        if report.measured_bytes is not None:
            parts.append(f"highest {format_bytes(report.measured_bytes)} of {format_bytes(report.capacity_bytes)}")
        if report.predicted_bytes is not None:
            parts.append(f"predicted {format_bytes(report.predicted_bytes)}")
        if report.step_s is not None:
            parts.append(f"{format_seconds(report.step_s)} for such a step")
        return ", ".join(parts) + "."

    def _measured(self) -> int | None:
        """Return the highest memory, as the estimate counts it."""
        on_card = self._target.has_caching_allocator
        values = self.history.column("process_bytes" if on_card else "peak_allocated_bytes")
        if on_card and not np.isfinite(values).any():  # CUDA's own counters: reserved, without the context.
            values = self.history.column("reserved_bytes") + self._target.context_bytes
        values = values[np.isfinite(values)]
        if not len(values):
            return None
        baseline = 0 if on_card else int(getattr(self.meter, "baseline_bytes", None) or 0)
        return int(values.max()) - baseline

    def _predicted(self) -> int | None:
        from ..estimate import estimate_run

        try:
            memory = estimate_run(self._tried, self._target, shape=self._shape).memory
        except (RecipeError, EstimateError, ModelError):
            return None
        return memory.process_bytes if self._target.has_caching_allocator else memory.peak_allocated_bytes


def _longest(rows: Any, batch_size: int, count: int) -> tuple[Any, int]:
    """Return ``count`` rows, the ``batch_size`` longest over and over, and the slots of such a batch."""
    lengths = np.asarray(rows["length"])
    longest = np.argsort(-lengths, kind="stable")[:batch_size]
    indices = np.resize(longest, count)
    return rows.select(indices.tolist()), int(lengths[longest[0]]) * batch_size


def try_worst_batch(
    recipe: Recipe,
    device: Device | None = None,
    *,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> DryStepReport:
    """Do what needs most memory, before the run: the longest batch with its update twice, an evaluation, a save.

    Args:
        recipe: The settings to try; the run itself begins anew afterwards.
        device: The device to run on; None reads this machine's.
        progress: Told how far it is.
        cancel: Ends it at the next micro-step.

    Raises:
        RecipeError: The settings contradict each other or the device.
        RunError: Another run is live in this process, or the dry step failed for another reason than memory.
    """
    from ..train.explain import as_run_error

    session = DryStep(recipe, device=device)
    try:
        session.start()
        while not session.finished.wait(0.05):
            if cancel is not None and cancel.is_set:
                session.stop(save=False)
            if progress is not None and session.progress is not None:
                progress(session.progress)
        report = session.report()
        if session.error is not None and report.finding is None:
            raise as_run_error(session.error)
        if cancel is not None:
            cancel.check()
        return report
    finally:
        session.close()
