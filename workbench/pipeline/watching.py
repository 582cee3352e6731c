"""``watch``: the doctors for anyone's own loop, and for any transformers or TRL Trainer.

::

    with workbench.watch(model, optimizer) as w:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            w.step(loss=loss, batch=batch)
    print(w.report())

What always runs is cheap: one read of the allocator's counter, the raw loss, the gradient norm. A rising counter opens
a deep look of a dozen steps, which names what stays; a NaN blocks the update and runs the step again.
"""

from __future__ import annotations

import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from ..diagnose.failures import explain_failure
from ..diagnose.finding import Finding, render_findings
from ..events import Event, Observer
from ..observe.device_clock import CudaClock
from ..observe.storages import StorageTracker, tensors_in
from ..units import format_bytes, parse_bytes
from . import accumulation, nonfinite_alarm, oom_alarm
from .device_watch import DeviceWatch
from .live_view import Displayed
from .loop_hooks import LoopHooks, StepFacts
from .loop_record import LoopRecord, recomputes
from .memory_watch import MARKS_OF_STEP, MemoryWatch
from .signals import as_float, called_by_user, user_frame
from .system_watch import SystemWatch
from .update_check import UpdateCheck


def watch(
    target: Any,
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    limit: str | int | None = None,
    look: str = "auto",
    max_length: int | None = None,
    continues: Watch | None = None,
    observers: Sequence[Observer] = (),
) -> Any:
    """Watch a plain loop, or a Trainer.

    Args:
        target: The model of a plain loop, a transformers or TRL ``Trainer``, or a Lightning ``Trainer``.
        optimizer: The loop's optimizer; None where nothing is updated.
        scheduler: The loop's learning-rate schedule, to see that it keeps pace.
        limit: Play a device that is full at this size, e.g. ``"24 MiB"``: every storage is counted, which costs time.
        look: ``"auto"`` looks deeply after a suspicion, ``"now"`` from the first steps on, ``"never"`` not at all.
        max_length: Longest row that should occur, in tokens.
        continues: The watch of the interrupted part of the same epoch, to see that no row comes twice.
        observers: Receive a ``step`` event per step and a ``finding`` event per finding.

    Returns:
        A Watch for a model (use it in a ``with`` block and call ``step`` after each update); a TrainerWatch for a
        Trainer (then call ``trainer.train()`` as usual); a callback, already added, for a Lightning Trainer (then
        call ``trainer.fit(module)``). All have ``findings`` and ``report()``.

    Raises:
        TypeError: ``target`` is neither a module nor a Trainer.
    """
    if isinstance(target, nn.Module):
        watch = Watch(target, optimizer, scheduler=scheduler, limit=limit, look=look, max_length=max_length)
        watch.observers += observers
        watch.continues = continues
        return watch
    if hasattr(target, "train") and hasattr(target, "add_callback") and hasattr(target, "training_step"):
        from .trainer_watch import TrainerWatch

        return TrainerWatch(target, limit=limit, look=look, observers=observers)
    if hasattr(target, "fit") and isinstance(getattr(target, "callbacks", None), list):
        from .lightning_watch import watch_lightning

        return watch_lightning(target, limit=limit, look=look, observers=observers)
    raise TypeError(
        f"watch() got {type(target).__name__}. Give it a model (torch.nn.Module) with its optimizer, or a Trainer."
    )


class Watch(Displayed):
    """Watches one loop. ``findings`` is complete when the block has been left, by its end or by an exception."""

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        limit: str | int | None = None,
        look: str = "auto",
        max_length: int | None = None,
    ) -> None:
        if look not in ("auto", "now", "never"):
            raise ValueError(f"look={look!r}; allowed are 'auto', 'now' and 'never'.")
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.limit_bytes = parse_bytes(limit) if limit is not None else None
        self.look_mode, self.max_length = look, max_length
        self.observers: list[Observer] = []
        self.continues: Watch | None = None
        self.rerun_override: Any = None  # A Trainer knows how to run its step again.
        self.num_steps = 0
        self.own_s = 0.0  # Seconds spent by the watch itself, looks and replays left out.
        self.hooks = LoopHooks(
            model, optimizer, on_phase=self._phase_changed, on_update=self._before_update, on_output=self._mark
        )
        self.record = LoopRecord(model)
        self.memory = MemoryWatch(model, optimizer, mode=look)
        self.system: SystemWatch | None = None
        self.device: DeviceWatch | None = None
        self.updates = UpdateCheck(model, optimizer)
        self._last_update: tuple[int, float | None] | None = None  # Step and gradient norm.
        self.tracker: StorageTracker | None = None
        self.last_facts: StepFacts = StepFacts()
        self.accumulation_looks = 0
        self._findings: dict[tuple[str, Any], Finding] = {}
        self._scheduler_start: int | None = None
        self._last_border = 0.0
        self.is_open = False
        self._deep_s = 0.0
        self._undo: list[Any] = []
        self._alarmed = 0

    # -- the block ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        return self.begin()

    def begin(self, *, sees_forward: bool = True) -> Watch:
        """Register the hooks; without ``sees_forward`` the caller tells of forward passes itself."""
        self.is_open = True
        self.hooks.attach(sees_forward=sees_forward)
        self._watch_collector()
        self.system = SystemWatch(self.model, self.record.speed)
        self.device = self._device_watch()
        if self.limit_bytes is not None:
            self.tracker = StorageTracker(self.model, limit_bytes=self.limit_bytes)
            self.tracker.register_existing(oom_alarm.existing_tensors(self.model, self.optimizer))
            self.tracker.__enter__()
            self.memory.is_blocked = True
        if self.scheduler is not None:
            self._scheduler_start = int(self.scheduler.last_epoch)
        self._last_border = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish(error, sys._getframe(1))

    def finish(self, error: BaseException | None, frame: FrameType | None) -> None:
        """End the watch and complete the findings; ``error`` is what left the loop."""
        if not self.is_open:
            return
        self.is_open = False
        facts = self.last_facts = self.hooks.facts
        try:
            if self.tracker is not None:
                self.tracker.__exit__(None, None, None)
            if self.memory.probe is not None:
                self.memory.close(self.num_steps, frame)
            if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
                self.add(oom_alarm.explain_oom(self, error, facts))
            elif isinstance(error, Exception):
                self._explain_error(error, facts)
            self._judge_whole_run()
        finally:
            for undo in self._undo:
                undo()
            self._undo.clear()
            self.hooks.detach()
            if self.device is not None:
                self.device.close()
            for finding in self.memory.confirmed():
                self.add(finding)
            words = "" if error is None else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            for observer in self.observers:
                observer.on_event(Event("state", {"state": "done" if error is None else "failed", "error": words}))

    # -- what a loop calls -------------------------------------------------------------------------------------

    def step(self, *, loss: Any = None, batch: Any = None) -> None:
        """Tell the watch that one step is over; call it after the update.

        Args:
            loss: The raw loss, a tensor or a number.
            batch: What the step was computed from: a tensor or a mapping of tensors.
        """
        self.border(loss, batch, sys._getframe(1))

    def border(self, loss: Any, batch: Any, frame: FrameType | None) -> None:
        """Read the cheap channels after a step and act on what they show."""
        started = time.perf_counter()
        facts = self.last_facts = self.hooks.take()
        value = as_float(loss)
        if value is None and facts.micro_batches and facts.micro_batches[-1].loss is not None:
            value = as_float(facts.micro_batches[-1].loss)
        self.num_steps += 1
        self.record.add(value, facts, started - self._last_border)
        self._deep_s = 0.0
        if (value is not None and not math.isfinite(value)) or (
            facts.grad_norm is not None and not math.isfinite(facts.grad_norm)
        ):
            self._deeply(self._alarm, value, batch, facts, frame)
        elif facts.num_updates and not facts.was_blocked and self.optimizer is not None:
            self._last_update = (self.num_steps, facts.grad_norm)
            if not self.updates.is_over:
                self.add(self.updates.after_step())
        if self.system is not None:
            self.system.step(self.num_steps)
        if self.device is not None:
            self.device.border()
        self._look_at_memory(frame)
        self._emit(value, facts)
        if self.tracker is not None:
            self.tracker.step = self.num_steps
        self._last_border = time.perf_counter()
        self.own_s += self._last_border - started - self._deep_s

    # -- results -----------------------------------------------------------------------------------------------

    @property
    def findings(self) -> list[Finding]:
        """Faults found so far; a verdict of health is in ``memory_verdict``."""
        return list(self._findings.values())

    @property
    def memory_verdict(self) -> Finding | None:
        """What the last deep look said."""
        return self.memory.verdict

    def report(self) -> str:
        """Return everything found as text, with what was watched and what it cost."""
        lines = [render_findings(self.findings)]
        if self.memory_verdict is not None and not self.memory_verdict.is_fault:
            lines.append(self.memory_verdict.summary)
        elif self.memory_verdict is None:
            lowest = self.memory.lowest_bytes
            low = format_bytes(lowest) if lowest is not None else "not read"
            lines.append(f"Memory at rest gave no reason for a deep look (lowest level {low}).")
        per_step = 1000 * self.own_s / max(1, self.num_steps)
        lines.append(f"Watched {self.num_steps} steps; watching cost {per_step:.2f} ms per step.")
        return "\n".join(lines)

    def add_observer(self, observer: Observer) -> None:
        """Let an observer have a ``step`` event per step, a ``finding`` per finding, and a ``state`` at the end."""
        self.observers.append(observer)

    def add(self, finding: Finding | None) -> None:
        """Add a finding once per cause and place."""
        if finding is None:
            return
        key = (finding.cause, finding.where.get("object", finding.where.get("parameter", "")))
        if finding.is_fault and key not in self._findings:
            self._findings[key] = finding
            for observer in self.observers:
                observer.on_event(Event("finding", finding.to_dict()))

    # -- inside ------------------------------------------------------------------------------------------------

    def _device_watch(self) -> DeviceWatch | None:
        """Return the watch of a CUDA device's clock; None where the model computes on the host."""
        first = next(self.model.parameters(), None) if self.model is not None else None
        if first is None or first.device.type != "cuda":
            return None
        return DeviceWatch(CudaClock(), self.record.speed)

    def _phase_changed(self, phase: str) -> None:
        if self.device is not None:
            self.device.phase(phase)
        if phase in ("forward", "evaluation") and self.num_steps:
            self.record.wait_ended(time.perf_counter() - self._last_border)
        for tracker in (self.tracker, self.memory.probe.tracker if self.memory.probe is not None else None):
            if tracker is not None:
                tracker.phase = "between" if phase == "loss" else phase

    def _mark(self, output: Any) -> None:
        """Lay life marks into the first tensors that the model returned."""
        self.memory.marks.lay(itertools.islice(tensors_in(output), MARKS_OF_STEP))

    def _before_update(self, facts: StepFacts) -> None:
        """Keep samples of weights, and compare accumulated gradients while those of the step are still there."""
        self.updates.before_update()
        if len(facts.micro_batches) > 1 and self._alarmed == 0:
            self.add(accumulation.compare_gradients(self, facts))

    @property
    def last_update(self) -> dict[str, Any]:
        """What the last applied update was; empty before the first."""
        if self._last_update is None:
            return {}
        step, grad_norm = self._last_update
        group = self.optimizer.param_groups[0]
        rates = self.record.learning_rates
        return {
            "step": step,
            "lr": rates[-1] if rates else float(group.get("lr", 0.0)),
            "eps": group.get("eps"),
            "dtypes": {parameter.dtype for parameter in group["params"]},
            "grad_norm": grad_norm,
            "optimizer": type(self.optimizer).__name__,
        }

    def _alarm(self, loss: float | None, batch: Any, facts: StepFacts, frame: FrameType | None) -> None:
        self._alarmed += 1
        if self._alarmed > 3:
            return  # The first alarms explain; a run that stays bad is not run again at each step.
        for finding in nonfinite_alarm.explain_alarm(self, loss, batch, facts, user_frame(frame)):
            self.add(finding)

    def _look_at_memory(self, frame: FrameType | None) -> None:
        memory, tokens = self.memory, self.record.tokens[-1]
        if memory.probe is not None:
            self._deeply(memory.look_border, self.num_steps, tokens, frame)
        elif memory.read(self.num_steps, tokens):
            self._deeply(memory.open, self.num_steps + 1)

    def _deeply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run what happens only after a suspicion, and keep its time apart from what always runs."""
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            self._deep_s += time.perf_counter() - started

    def _explain_error(self, error: Exception, facts: StepFacts) -> None:
        from .replay import inputs_of

        micro = facts.micro_batches[-1] if facts.micro_batches else None
        finding = explain_failure(error, self.model, self.optimizer, inputs_of(micro))
        self.add(finding)

    def _judge_whole_run(self) -> None:
        if self.system is not None:
            self.system.end(recomputes=self.model is not None and recomputes(self.model))
        advanced = None
        if self.scheduler is not None and self._scheduler_start is not None:
            advanced = int(self.scheduler.last_epoch) - self._scheduler_start
        before = list(self.continues.record.seen_rows) if self.continues is not None else []
        for finding in self.record.faults(schedule_steps=advanced, rows_before=before):
            self.add(finding)

    def _watch_collector(self) -> None:
        """Time the full collections that the loop itself asks for, and count empty_cache calls."""
        speed = self.record.speed
        begun = [0.0]

        def note(phase: str, info: Mapping[str, int]) -> None:
            if info["generation"] != 2:
                return
            if phase == "start":
                begun[0] = time.perf_counter()
            elif called_by_user():
                speed.gc_s += time.perf_counter() - begun[0]
                speed.num_gc += 1

        gc.callbacks.append(note)
        self._undo.append(lambda: gc.callbacks.remove(note))
        cuda: Any = torch.cuda
        empty_cache = cuda.empty_cache

        def counted() -> None:
            speed.num_empty_cache += 1
            empty_cache()

        def restore() -> None:
            if cuda.empty_cache is counted:
                cuda.empty_cache = empty_cache

        cuda.empty_cache = counted
        self._undo.append(restore)

    def _emit(self, loss: float | None, facts: StepFacts) -> None:
        if not self.observers:
            return
        data: dict[str, Any] = {
            "step": self.num_steps,
            "step_s": self.record.speed.step_s[-1],
            "loss": loss,
            "grad_norm": facts.grad_norm,
            "learning_rate": facts.learning_rate,
            "num_tokens": self.record.tokens[-1],
            "allocated_bytes": self.memory.rest[-1] if self.memory.rest else None,
        }
        for observer in self.observers:
            observer.on_event(Event("step", {name: value for name, value in data.items() if value is not None}))
