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
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..diagnose.failures import explain_failure
from ..diagnose.finding import Finding, render_findings
from ..diagnose.speed import SpeedEvidence, find_speed_faults
from ..diagnose.survivors import name_suspects
from ..events import Event, Observer
from ..observe.holders import Root, roots_of_frame, roots_of_process
from ..observe.memory_look import MemoryLook, MemoryProbe
from ..observe.process_memory import InUseReader
from ..observe.storages import StorageTracker
from ..units import format_bytes, parse_bytes
from . import accumulation, nonfinite_alarm, oom_alarm
from .loop_hooks import LoopHooks, StepFacts
from .signals import as_float, called_by_user, fingerprints, rises, user_frame

LOOK_STEPS = 12  # Cohorts of nine steps that must survive three more.
FIRST_SUSPICION = 8  # Steps whose counter must be seen before it can rouse suspicion.
EXTRA_STEPS = 24  # More steps where something stays but not at each step.
SETTLED_STEPS = 40
READ_EVERY = 5
KEPT_STEPS = 4096


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
        target: The model of a plain loop, or a transformers or TRL ``Trainer``.
        optimizer: The loop's optimizer; None where nothing is updated.
        scheduler: The loop's learning-rate schedule, to see that it keeps pace.
        limit: Play a device that is full at this size, e.g. ``"24 MiB"``: every storage is counted, which costs time.
        look: ``"auto"`` looks deeply after a suspicion, ``"now"`` from the first steps on, ``"never"`` not at all.
        max_length: Longest row that should occur, in tokens.
        continues: The watch of the interrupted part of the same epoch, to see that no row comes twice.
        observers: Receive a ``step`` event per step and a ``finding`` event per finding.

    Returns:
        A Watch for a model (use it in a ``with`` block and call ``step`` after each update); a TrainerWatch for a
        Trainer (then call ``trainer.train()`` as usual). Both have ``findings`` and ``report()``.

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
    raise TypeError(
        f"watch() got {type(target).__name__}. Give it a model (torch.nn.Module) with its optimizer, or a Trainer."
    )


class Watch:
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
        self.seen_rows: deque[int] = deque(maxlen=KEPT_STEPS)  # Fingerprints of rows, in order.
        self.extra_roots: list[Root] = []
        self.rerun_override: Any = None  # A Trainer knows how to run its step again.
        self.num_steps = 0
        self.memory_verdict: Finding | None = None
        self.own_s = 0.0  # Seconds spent by the watch itself, looks and replays left out.
        self.hooks = LoopHooks(model, optimizer, on_phase=self._phase_changed, on_update=self._keep_gradient)
        self.losses: deque[float] = deque(maxlen=KEPT_STEPS)
        self.grad_norms: deque[float] = deque(maxlen=KEPT_STEPS)
        self.clipped: deque[bool] = deque(maxlen=KEPT_STEPS)
        self.tokens: deque[int] = deque(maxlen=KEPT_STEPS)
        self.rows: deque[tuple[int, int]] = deque(maxlen=KEPT_STEPS)  # rows per micro-batch, micro-batches
        self.row_tokens: deque[int] = deque(maxlen=KEPT_STEPS)
        self.rest: deque[int] = deque(maxlen=256)
        self.rest_steps: deque[int] = deque(maxlen=256)
        self.rest_tokens: deque[int] = deque(maxlen=256)
        self._reader = InUseReader()
        self.last_update: dict[str, Any] = {}
        self.speed = SpeedEvidence(slots=[], real=[], longest=[], widths=[], step_s=[])
        self.tracker: StorageTracker | None = None
        self.last_facts: StepFacts = StepFacts()
        self._findings: dict[tuple[str, Any], Finding] = {}
        self._probe: MemoryProbe | None = None
        self._suspects: tuple[MemoryLook, list[Finding]] | None = None
        self._extended = False
        self._next_look = 3 if look == "now" else FIRST_SUSPICION
        self._scheduler_start: int | None = None
        self._num_updates = 0
        self._last_border = 0.0
        self._is_open = False
        self._waits = True
        self._deep_s = 0.0
        self._undo: list[Any] = []
        self._alarmed = 0
        self.accumulation_looks = 0
        self.step_gradient: Tensor | None = None  # Kept for one step when its micro-batches differ in length.

    # -- the block ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        self._is_open = True
        self.hooks.attach()
        self._watch_collector()
        if self.limit_bytes is not None:
            self.tracker = StorageTracker(self.model, limit_bytes=self.limit_bytes)
            self.tracker.register_existing(oom_alarm.existing_tensors(self.model, self.optimizer))
            self.tracker.__enter__()
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
        if not self._is_open:
            return
        self._is_open = False
        facts = self.last_facts = self.hooks.facts
        try:
            if self.tracker is not None:
                self.tracker.__exit__(None, None, None)
            if self._probe is not None:
                self._close_look(frame)
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
            self._confirm_suspects()

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
        self._record(value, facts, batch, started)
        self._deep_s = 0.0
        if (value is not None and not math.isfinite(value)) or (
            facts.grad_norm is not None and not math.isfinite(facts.grad_norm)
        ):
            self._deeply(self._alarm, value, batch, facts, frame)
        elif facts.num_updates and not facts.was_blocked and self.optimizer is not None:
            self.last_update = self._describe_update(facts)
        self._memory(facts, frame)
        if len(facts.micro_batches) > 1 and self._alarmed == 0:
            self.add(self._deeply(accumulation.compare_gradients, self, facts))
            self.step_gradient = None
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

    def report(self) -> str:
        """Return everything found as text, with what was watched and what it cost."""
        lines = [render_findings(self.findings)]
        if self.memory_verdict is not None and not self.memory_verdict.is_fault:
            lines.append(self.memory_verdict.summary)
        elif self.memory_verdict is None:
            low = format_bytes(min(self.rest)) if self.rest else "nothing"
            lines.append(f"Memory at rest gave no reason for a deep look (lowest level {low}).")
        per_step = 1000 * self.own_s / max(1, self.num_steps)
        lines.append(f"Watched {self.num_steps} steps; watching cost {per_step:.2f} ms per step.")
        return "\n".join(lines)

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

    def _phase_changed(self, phase: str) -> None:
        if phase in ("forward", "evaluation") and self.num_steps:
            self.speed.data_s += max(0.0, time.perf_counter() - self._last_border) if self._waits else 0.0
            self._waits = False
        for tracker in (self.tracker, self._probe.tracker if self._probe is not None else None):
            if tracker is not None:
                tracker.phase = "between" if phase == "loss" else phase

    def _keep_gradient(self, facts: StepFacts) -> None:
        """Keep the gradient that is about to be applied, where accumulation is worth a comparison."""
        self.step_gradient = None
        micros = [micro for micro in facts.micro_batches if micro.had_grad]
        if len(micros) < 2 or self.accumulation_looks >= accumulation.MAX_LOOKS:
            return
        counts = [accumulation.supervised(micro) for micro in micros]
        if min(counts) > 0 and max(counts) >= accumulation.UNEQUAL * min(counts):
            self.step_gradient = accumulation.flat_gradient(self)

    def _record(self, loss: float | None, facts: StepFacts, batch: Any, now: float) -> None:
        self._waits = True
        speed = self.speed
        speed.step_s.append(now - self._last_border)  # type: ignore[attr-defined]
        self.losses.append(math.nan if loss is None else loss)
        self.grad_norms.append(math.nan if facts.grad_norm is None else facts.grad_norm)
        self.clipped.append(facts.was_clipped)
        trained = [micro for micro in facts.micro_batches if micro.had_grad]
        tokens = sum(micro.num_tokens for micro in trained or facts.micro_batches)
        self.tokens.append(tokens)
        self.rows.append((trained[0].num_rows if trained else 0, len(trained)))
        for micro in trained:
            self.seen_rows.extend(fingerprints(micro))
            mask = micro.kwargs.get("attention_mask")
            if isinstance(mask, Tensor) and mask.ndim == 2 and mask.device.type == "cpu":
                lengths = mask.sum(1)
                self.row_tokens.extend(lengths.tolist())
                speed.slots.append(micro.num_tokens)  # type: ignore[attr-defined]
                speed.real.append(int(lengths.sum()))  # type: ignore[attr-defined]
                speed.longest.append(int(lengths.max()))  # type: ignore[attr-defined]
                speed.widths.append(mask.shape[1])  # type: ignore[attr-defined]
            elif micro.num_rows:
                self.row_tokens.extend([micro.num_tokens // micro.num_rows] * micro.num_rows)
        self._num_updates += facts.num_updates
        speed.num_eval_forwards += facts.num_eval_forwards
        if facts.num_eval_forwards and getattr(self.model, "is_gradient_checkpointing", False):
            assert self.model is not None
            if self.model.training:
                speed.num_recomputed += facts.num_eval_forwards

    def _describe_update(self, facts: StepFacts) -> dict[str, Any]:
        group = self.optimizer.param_groups[0]
        return {
            "step": self.num_steps,
            "lr": float(group.get("lr", 0.0)),
            "eps": group.get("eps"),
            "dtypes": {parameter.dtype for parameter in group["params"]},
            "grad_norm": facts.grad_norm,
            "optimizer": type(self.optimizer).__name__,
        }

    def _alarm(self, loss: float | None, batch: Any, facts: StepFacts, frame: FrameType | None) -> None:
        self._alarmed += 1
        if self._alarmed > 3:
            return  # The first alarms explain; a run that stays bad is not run again at each step.
        for finding in nonfinite_alarm.explain_alarm(self, loss, batch, facts, user_frame(frame)):
            self.add(finding)

    def _memory(self, facts: StepFacts, frame: FrameType | None) -> None:
        if self._probe is not None:
            self._deeply(self._look_border, frame)
            return
        # Reading the heap's counter takes 0.2 ms of a fragmented process: once the run has settled, not at every step.
        is_turn = self.num_steps <= SETTLED_STEPS or self.num_steps % READ_EVERY == 0
        level = self._reader.read() if is_turn else None
        if level is not None:
            self.rest.append(level)
            self.rest_steps.append(self.num_steps)
            self.rest_tokens.append(self.tokens[-1])
        if level is None and self.look_mode != "now":
            return
        if self.look_mode == "never" or self.num_steps < self._next_look or self._suspects is not None:
            return
        if self.tracker is not None:
            return  # Two trackers would count twice; the limit's own is on.
        if self.look_mode == "now" or rises(self.rest, self.rest_steps, self.rest_tokens):
            self._probe = MemoryProbe(self.model, self.optimizer, length=LOOK_STEPS)
            self._deeply(self._probe.open, self.num_steps + 1)
        else:
            # Ask again after some steps: a test at every step would find a rise by chance sooner or later.
            self._next_look = self.num_steps + max(4, self.num_steps // 8)

    def _look_border(self, frame: FrameType | None) -> None:
        """One step of an open look; the window grows once where something stays but not at each step."""
        assert self._probe is not None
        if not self._probe.border(self.num_steps, self.tokens[-1]):
            return
        stays = self._probe.survivors_so_far()
        uneven = len({birth.step for birth in stays}) < 0.8 * (len(self._probe.look.steps) - 3)
        if stays and uneven and not self._extended:
            self._extended = True
            self._probe.extend(EXTRA_STEPS)
        else:
            self._close_look(frame)

    def _deeply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run what happens only after a suspicion, and keep its time apart from what always runs."""
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            self._deep_s += time.perf_counter() - started

    def _close_look(self, frame: FrameType | None) -> None:
        assert self._probe is not None
        probe, self._probe = self._probe, None
        look = probe.close()
        self._extended = False
        for series in (self.rest, self.rest_steps, self.rest_tokens):
            series.clear()
        roots = self._roots(frame)
        findings = name_suspects(look, roots, self.model)
        self.memory_verdict = next(iter(findings), None)
        faults = [finding for finding in findings if finding.is_fault]
        if faults:
            self._suspects = (look, faults)
        self._next_look = 2 * self.num_steps + FIRST_SUSPICION if self.look_mode == "auto" else sys.maxsize

    def _roots(self, frame: FrameType | None) -> list[Root]:
        roots = roots_of_frame(frame) + self.extra_roots
        if self.model is not None:
            roots.append(Root("model", "model", self.model))
        if self.optimizer is not None:
            roots.append(Root("optimizer", "optimizer", self.optimizer))
        return roots + roots_of_process()

    def _confirm_suspects(self) -> None:
        """Report what a look found, unless most of it has gone since: then it was a buffer with a limit."""
        if self._suspects is None:
            return
        look, faults = self._suspects
        alive = [birth for birth in look.survivors if birth.is_alive]
        if look.survivors and len(alive) < 0.5 * len(look.survivors):
            faults = [finding for finding in faults if finding.cause not in ("leak.kept_tensors", "leak.steady_growth",
                                                                           "leak.graph_kept", "leak.per_phase",
                                                                           "leak.hook_buffer")]  # fmt: skip
        for finding in faults:
            self.add(finding)

    def _explain_error(self, error: Exception, facts: StepFacts) -> None:
        from .replay import inputs_of

        micro = facts.micro_batches[-1] if facts.micro_batches else None
        finding = explain_failure(error, self.model, self.optimizer, inputs_of(micro))
        self.add(finding)

    def _judge_whole_run(self) -> None:
        from ..diagnose.course import find_course_faults, find_repeated_rows

        for finding in find_speed_faults(self.speed):
            self.add(finding)
        advanced = None
        if self.scheduler is not None and self._scheduler_start is not None:
            advanced = int(self.scheduler.last_epoch) - self._scheduler_start
        for finding in find_course_faults(
            losses=list(self.losses),
            grad_norms=list(self.grad_norms),
            clipped=list(self.clipped),
            rows=list(self.rows),
            num_updates=self._num_updates,
            schedule_steps=advanced,
        ):
            self.add(finding)
        if self.continues is not None:
            self.add(find_repeated_rows(list(self.continues.seen_rows), list(self.seen_rows)))

    def _watch_collector(self) -> None:
        """Time the full collections that the loop itself asks for, and count empty_cache calls."""
        speed = self.speed
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

    def _emit(self, loss: float | None, facts: StepFacts) -> None:
        if not self.observers:
            return
        group = self.optimizer.param_groups[0] if self.optimizer is not None else {}
        data: dict[str, Any] = {
            "step": self.num_steps,
            "step_s": self.speed.step_s[-1],
            "loss": loss,
            "grad_norm": facts.grad_norm,
            "learning_rate": float(group["lr"]) if "lr" in group else None,
            "num_tokens": self.tokens[-1],
            "allocated_bytes": self.rest[-1] if self.rest else None,
        }
        for observer in self.observers:
            observer.on_event(Event("step", {name: value for name, value in data.items() if value is not None}))
