"""A run with everything attached: recorder, memory meter and doctors. Panel and command line start runs here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..diagnose import Finding, LeakVerdict, diagnose_run, judge_memory
from ..events import Event, Meter, Observer
from ..hardware import Device, read_device
from ..observe.history import History
from ..observe.meters import choose_meter
from ..observe.recorder import Recorder
from ..recipe import Recipe
from ..train.session import Session

# The doctors look at the whole history, a few milliseconds for a long run: not at every step.
LOOK_EVERY_STEPS = 10


class WatchedSession(Session):
    """A Session whose steps are recorded and judged while they happen.

    Attributes:
        history: Every step, those before a resume included.
        meter: What measures memory.
        findings: What the doctors found so far, each cause once.
    """

    history: History

    def __init__(self, recipe: Recipe, *, device: Device, meter: Meter, **options: Any) -> None:
        super().__init__(recipe, device=device, meters=[meter], **options)
        self.findings: list[Finding] = []
        self.meter = meter
        self._recorder = Recorder(self.run_dir)
        self.history = self._recorder.history
        self.add_observer(self._recorder)
        self._counter = str(getattr(meter, "counter", "allocated bytes"))
        self._capacity_bytes = device.capacity_bytes

    def leak_verdict(self) -> LeakVerdict:
        """Return what the leak detector says of the steps so far, and what it watched."""
        return judge_memory(self.history, counter=self._counter, capacity_bytes=self._capacity_bytes)

    def verdicts(self) -> list[str]:
        """Return one line per doctor that has a verdict, good or bad."""
        return [self.leak_verdict().text, *(finding.summary for finding in self.findings if finding.kind != "leak")]

    def summary(self) -> dict[str, Any]:
        """Return where the run stands, with the doctors' verdicts, as plain JSON values."""
        return {
            **super().summary(),
            "verdicts": self.verdicts(),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def look(self) -> list[Finding]:
        """Ask the doctors now; return and keep what is new since they last looked."""
        known = {finding.cause for finding in self.findings}
        found = diagnose_run(self.history, counter=self._counter, capacity_bytes=self._capacity_bytes)
        new = [finding for finding in found if finding.cause not in known]
        self.findings.extend(new)
        return new


class _Doctors:
    """An Observer that asks the doctors every few steps and at the end, and tells the others what is new."""

    def __init__(self, session: WatchedSession, told: Sequence[Observer]) -> None:
        self._session = session
        self._told = told

    def on_event(self, event: Event) -> None:
        is_step = event.kind == "step" and int(event.data["step"]) % LOOK_EVERY_STEPS == 0
        is_end = event.kind == "state" and event.data.get("state") in ("done", "stopped", "failed")
        if not (is_step or is_end):
            return
        for finding in self._session.look():
            for observer in self._told:
                observer.on_event(Event("finding", finding.to_dict()))


def start_session(
    recipe: Recipe,
    *,
    run_dir: str | Path | None = None,
    resume_from: str | Path | None = None,
    observers: Sequence[Observer] = (),
    device: Device | None = None,
) -> WatchedSession:
    """Start a run in its own thread, recorded and watched, and return at once.

    Args:
        recipe: What to run.
        run_dir: The run's folder; None makes a new one below ``./runs``.
        resume_from: A run folder or checkpoint to continue from.
        observers: Receive every event besides the recorder and the doctors.
        device: The device to run on; None reads this machine's.

    Raises:
        RecipeError: The settings contradict each other or the device; all problems are listed.
        RunFolderError: The folder is in use, holds another run, or cannot be written.
        RunError: A run is live in this process.
    """
    here = device or read_device(recipe.hardware.device)
    session = WatchedSession(
        recipe, device=here, meter=choose_meter(recipe, here), run_dir=run_dir, resume_from=resume_from
    )
    for observer in observers:
        session.add_observer(observer)
    # Last, so that the doctors see the step already in the history; and told first is the recorder, which writes.
    session.add_observer(_Doctors(session, [session._recorder, *observers]))
    session.start()
    return session
