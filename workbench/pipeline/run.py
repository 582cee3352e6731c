"""A run with everything attached: recorder, memory meter and doctors. Panel and command line start runs here."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..diagnose import Finding, Fix, LeakVerdict, diagnose_run, judge_memory
from ..diagnose.oom import OomEvidence, judge_oom
from ..errors import Cancelled, Problem, RecipeError, RunError
from ..estimate import BatchShape
from ..estimate.shape import shape_of_lengths
from ..events import Event, Meter, Observer, Progress
from ..hardware import Device, read_device, target_device
from ..observe.economy import measure_economy
from ..observe.history import History
from ..observe.meters import choose_meter
from ..observe.recorder import Recorder
from ..recipe import Recipe
from ..train.explain import is_out_of_memory
from ..train.run_folder import list_checkpoints
from ..train.session import Session

# The doctors look at the whole history, a few milliseconds for a long run: not at every step.
LOOK_EVERY_STEPS = 10
# Spikes that the doctors look at: each holds its rows.
KEPT_SPIKES = 100


class WatchedSession(Session):
    """A Session whose steps are recorded and judged while they happen, and which goes on after a failure.

    Attributes:
        history: Every step, those before a resume included.
        meter: What measures memory.
        findings: What the doctors found so far, each cause once.
        spikes: The newest steps whose loss stood out, as their events say it.
        samples: What the model answered before the run and at its checkpoints, as their events say it.
    """

    history: History

    def __init__(
        self, recipe: Recipe, *, device: Device, meter: Meter, observers: Sequence[Observer] = (), **options: Any
    ) -> None:
        super().__init__(recipe, device=device, meters=[meter], **options)
        self.findings: list[Finding] = []
        self.spikes: deque[Mapping[str, Any]] = deque(maxlen=KEPT_SPIKES)
        self.samples: list[Mapping[str, Any]] = []
        self.meter = meter
        recorder = Recorder(self.run_dir)
        self.history = recorder.history
        self._here, self._told = device, tuple(observers)
        self._failure: Finding | None = None
        # The doctors last, so that they see the step already in the history; and told first is the recorder, which
        # writes.
        for observer in (recorder, *observers, _Doctors(self)):
            self.add_observer(observer)
        self._counter = str(getattr(meter, "counter", "allocated bytes"))
        self._target = _device_of(recipe, device)
        self._shape: BatchShape | None = None
        self._seen: OomEvidence | None = None
        self._loading: Any = None

    def leak_verdict(self) -> LeakVerdict:
        """Return what the leak detector says of the steps so far, and what it watched."""
        return judge_memory(self.history, counter=self._counter, capacity_bytes=self._target.capacity_bytes)

    def verdicts(self) -> list[str]:
        """Return one line per doctor that has a verdict, good or bad."""
        return [self.leak_verdict().text, *(finding.summary for finding in self.findings if finding.kind != "leak")]

    def summary(self) -> dict[str, Any]:
        """Return where the run stands, with the doctors' verdicts, as plain JSON values."""
        return {
            **super().summary(),
            "economy": asdict(measure_economy(self.history)),
            "verdicts": self.verdicts(),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def look(self) -> list[Finding]:
        """Ask the doctors now; return, keep and publish what is new since they last looked."""
        known = {finding.cause for finding in self.findings}
        found = diagnose_run(
            self.history, counter=self._counter, capacity_bytes=self._target.capacity_bytes, spikes=tuple(self.spikes)
        )
        new = [finding for finding in found if finding.cause not in known]
        for finding in new:
            self._tell_finding(finding)
        return new

    # -- after a failure -------------------------------------------------------------------------------------------

    @property
    def can_continue(self) -> bool:
        """Whether ``continue_with`` has something to go on with: the run failed or was stopped."""
        return self.state in ("failed", "stopped")

    def remedies(self) -> list[Fix]:
        """Return what can be applied with one call of ``continue_with``, the cheapest first; empty while all is well.

        Only of the newest failure: what was found before it is no reason to change the settings.
        """
        if self.state != "failed" or self._failure is None:
            return []
        return [fix for fix in self._failure.fixes if fix.changes]

    def continue_with(self, changes: Mapping[str, Any] | None = None) -> WatchedSession:
        """Go on from the last good step with changed settings, in this process and in the same run folder.

        Order of the data, optimizer, schedule and random state go on as they were; steps that were begun and not
        finished come again.

        Args:
            changes: ``{field: value}``; None takes the first of ``remedies()``, or no change where there is none.

        Returns:
            The session that goes on, started.

        Raises:
            RunError: The run is live, done or was never started.
            RecipeError: The changes are not allowed, or would change the samples of an optimizer step.
        """
        if not self.can_continue:
            raise RunError(f"The run is {self.state}; only one that failed or was stopped can be continued.")
        if changes is None:
            changes = next((fix.changes for fix in self.remedies()), {})
        recipe = self.recipe.with_changes(changes)
        require_same_samples(self.recipe, recipe)
        has_checkpoint = bool(list_checkpoints(self.run_dir))
        session = WatchedSession(
            recipe,
            device=self._here,
            meter=choose_meter(recipe, self._here),
            observers=self._told,
            run_dir=self.run_dir,
            resume_from=self.run_dir if has_checkpoint else None,
            begins_again=not has_checkpoint,
        )
        session.start()
        if changes:
            session.publish(Event("edit", {"changes": dict(changes)}))
        return session

    def failure_text(self) -> str:
        """Return the doctors' word on the failure where they have one, and where the run can go on."""
        if self._failure is None:
            return super().failure_text()
        fix = self._failure.fixes[0].text if self._failure.fixes else ""
        return " ".join(part for part in (self._failure.summary, self.rescued, fix) if part)

    def _build(self, device: Device) -> Any:
        run = super()._build(device)
        self._shape = shape_of_lengths(self.recipe, np.asarray(run.data.train["length"]))
        adopt = getattr(self.meter, "adopt", None)
        if adopt is not None:  # Weights read from files were made by no operator that an emulated card could see.
            self._loading = run  # Where they have no room, the bill of the failure needs to know what they are.
            adopt([*run.model.parameters(), *run.model.buffers()])
            self._loading = None
        return run

    def _look_at_failure(self, error: BaseException, run: Any, engine: Any) -> None:
        loading, self._loading = self._loading, None
        if is_out_of_memory(error):
            from .run_failure import look_at_oom

            run = run or loading
            evaluated = self.history.last("eval_loss") is not None
            self._seen = look_at_oom(error, run, engine, self._target, self.meter, evaluated=evaluated)

    def _judge_failure(self) -> None:
        seen, self._seen = self._seen, None
        if seen is None:
            return
        from .remedies import find_remedies

        self._tell(Progress("diagnose", message="Looking for settings that fit"))
        try:
            seen.fixes, now = find_remedies(
                self.recipe, self._target, self._shape, seen, here=self._here, cancel=self._cancel
            )
        except Cancelled:
            now = None
        if now is not None:
            seen.predicted_bytes, seen.predicted_bill = now.memory.process_bytes, now.memory.breakdown
        self._failure = judge_oom(seen)
        self._tell_finding(self._failure)

    def _tell_finding(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.publish(Event("finding", finding.to_dict()))


class _Doctors:
    """An Observer that asks the doctors every few steps and at the end."""

    def __init__(self, session: WatchedSession) -> None:
        self._session = session

    def on_event(self, event: Event) -> None:
        if event.kind == "spike":
            self._session.spikes.append(event.data)
        if event.kind == "samples":
            self._session.samples.append(event.data)
        is_step = event.kind == "step" and int(event.data["step"]) % LOOK_EVERY_STEPS == 0
        is_end = event.kind == "state" and event.data.get("state") in ("done", "stopped", "failed")
        if is_step or is_end:
            self._session.look()


def _device_of(recipe: Recipe, device: Device) -> Device:
    """Return the device whose memory counts: this machine's, or the one it pretends to be."""
    return target_device(recipe) if recipe.hardware.emulate and not device.has_caching_allocator else device


def require_same_samples(before: Recipe, after: Recipe) -> None:
    """Refuse what would move the border between optimizer steps: the position in the data would mean nothing.

    Raises:
        RecipeError: The effective batch differs.
    """
    old, new = before.training.effective_batch_size, after.training.effective_batch_size
    if old == new:
        return
    field, size = "training.gradient_accumulation_steps", after.training.per_device_train_batch_size
    fixes = ((field, old // size),) if old % size == 0 else ()
    raise RecipeError(
        [Problem(field, f"a run that goes on keeps its {old} samples per optimizer step; these settings take {new}.",
                 fixes)]
    )  # fmt: skip


def start_session(
    recipe: Recipe,
    *,
    run_dir: str | Path | None = None,
    resume_from: str | Path | None = None,
    observers: Sequence[Observer] = (),
    device: Device | None = None,
    begins_again: bool = False,
) -> WatchedSession:
    """Start a run in its own thread, recorded and watched, and return at once.

    Args:
        recipe: What to run.
        run_dir: The run's folder; None makes a new one below ``./runs``.
        resume_from: A run folder or checkpoint to continue from, or a URL that ``training.upload_to`` was.
        observers: Receive every event besides the recorder and the doctors.
        device: The device to run on; None reads this machine's.
        begins_again: ``run_dir`` holds a run that ended before its first checkpoint: begin it again there.

    Raises:
        RecipeError: The settings contradict each other or the device; all problems are listed.
        RunFolderError: The folder is in use, holds another run, or cannot be written.
        RunError: A run is live in this process.
    """
    here = device or read_device(recipe.hardware.device)
    session = WatchedSession(
        recipe,
        device=here,
        meter=choose_meter(recipe, here),
        observers=observers,
        run_dir=run_dir,
        resume_from=resume_from,
        begins_again=begins_again,
    )
    session.start()
    return session
