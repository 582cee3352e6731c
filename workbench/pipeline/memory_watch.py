"""Memory of a watched loop: cheap counters that rouse suspicion, and the deep look that follows it.

Two channels run at every step. The allocator's counter at rest sees bytes; life marks see whether what a forward pass
returned, or the graph behind it, is still alive steps later. The second costs microseconds and is exact, the first sees
what never passed through the model. Neither is a verdict: they only open a look of a dozen steps.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from ..diagnose.finding import Finding
from ..diagnose.survivors import name_suspects
from ..observe.holders import Root, roots_of_frame, roots_of_process
from ..observe.memory_look import MemoryLook, MemoryProbe
from ..observe.process_memory import InUseReader
from .signals import rises

LOOK_STEPS = 12  # Cohorts of nine steps that must survive three more.
FIRST_SUSPICION = 8  # Steps whose counter must be seen before it can rouse suspicion.
EXTRA_STEPS = 24  # More steps where something stays but not at each step.
SETTLED_STEPS = 40
READ_EVERY = 5
MARK_AGE = 6  # Steps after which a mark should be dead; a loop's own variables live for one.
MARKS_OF_STEP = 2  # Outputs of one forward pass that are marked: loss and logits, or logits and state.

# A buffer that emptied itself after the look was one with a limit: what it held is no leak.
GONE_IS_HARMLESS = frozenset(
    {"leak.kept_tensors", "leak.steady_growth", "leak.graph_kept", "leak.per_phase", "leak.hook_buffer"}
)


class _Mark:
    """Lives as long as the autograd node it is laid into."""

    __slots__ = ("__weakref__",)


class LifeMarks:
    """Whether outputs of earlier steps, or their graphs, are still alive."""

    def __init__(self) -> None:
        self._steps: deque[list[weakref.ref[Any]]] = deque(maxlen=MARK_AGE + 4)
        self._new: list[weakref.ref[Any]] = []

    def lay(self, tensors: Iterable[Tensor]) -> None:
        """Mark a few tensors of this step: their storage, and their graph through the node's metadata."""
        for tensor in tensors:
            if len(self._new) >= 8:
                return
            if tensor.is_leaf and tensor.requires_grad:
                continue  # A parameter that the model returns lives on by right.
            # The weak reference of a storage follows the C++ object, that of a tensor only its Python wrapper.
            self._new.append(weakref.ref(tensor.untyped_storage()))
            if tensor.grad_fn is not None:
                self.lay_node(tensor.grad_fn)

    def lay_node(self, node: Any) -> None:
        """Mark a node of the autograd graph."""
        mark = _Mark()
        node.metadata["workbench"] = mark
        self._new.append(weakref.ref(mark))

    def step(self) -> bool:
        """End a step; True when each of the four oldest of the last ten steps left something alive."""
        self._steps.append(self._new)
        self._new = []
        if len(self._steps) < MARK_AGE + 4:
            return False
        return all(any(reference() is not None for reference in self._steps[index]) for index in range(4))


class MemoryWatch:
    """Decides when to look deeply, looks, and keeps the verdict.

    Attributes:
        rest: Bytes in use after the steps of ``rest_steps``.
        verdict: What the last look said.
        roots: Names to search for holders beside the loop's own.
    """

    def __init__(self, model: nn.Module | None, optimizer: Any, *, mode: str) -> None:
        self.model, self.optimizer, self.mode = model, optimizer, mode
        self.rest: deque[int] = deque(maxlen=256)
        self.rest_steps: deque[int] = deque(maxlen=256)
        self.rest_tokens: deque[int] = deque(maxlen=256)
        self.lowest_bytes: int | None = None
        self.marks = LifeMarks()
        self.verdict: Finding | None = None
        self.roots: list[Root] = []
        self.probe: MemoryProbe | None = None
        self.is_blocked = False  # Two trackers would count twice; with a limit, the limit's own is on.
        self._reader = InUseReader()
        self._suspects: tuple[MemoryLook, list[Finding]] | None = None
        self._extended = False
        self._next_look = 3 if mode == "now" else FIRST_SUSPICION

    def read(self, step: int, num_tokens: int) -> bool:
        """Read the counters after a step; True when a deep look should begin."""
        # Reading the heap's counter takes 0.2 ms of a fragmented process: once the run has settled, not at every step.
        is_turn = step <= SETTLED_STEPS or step % READ_EVERY == 0
        level = self._reader.read() if is_turn else None
        if level is not None:
            self.rest.append(level)
            self.rest_steps.append(step)
            self.rest_tokens.append(num_tokens)
            self.lowest_bytes = level if self.lowest_bytes is None else min(level, self.lowest_bytes)
        stays = self.marks.step()
        if self.mode == "never" or step < self._next_look or self._suspects is not None or self.is_blocked:
            return False
        if self.mode == "now" or stays:
            return True
        if level is None:
            return False
        if rises(self.rest, self.rest_steps, self.rest_tokens):
            return True
        # Ask again after some steps: a test at every step would find a rise by chance sooner or later.
        self._next_look = step + max(4, step // 8)
        return False

    def open(self, step: int) -> None:
        """Begin a deep look with the step about to run."""
        self.probe = MemoryProbe(self.model, self.optimizer, length=LOOK_STEPS)
        self.probe.open(step)

    def look_border(self, step: int, num_tokens: int, frame: FrameType | None) -> None:
        """One step of an open look; the window grows once where something stays but not at each step."""
        assert self.probe is not None
        self.marks.step()
        if not self.probe.border(step, num_tokens):
            return
        stays = self.probe.survivors_so_far()
        uneven = len({birth.step for birth in stays}) < 0.8 * (len(self.probe.look.steps) - 3)
        if stays and uneven and not self._extended:
            self._extended = True
            self.probe.extend(EXTRA_STEPS)
        else:
            self.close(step, frame)

    def close(self, step: int, frame: FrameType | None) -> None:
        """End the open look and judge it."""
        assert self.probe is not None
        probe, self.probe = self.probe, None
        look = probe.close()
        self._extended = False
        for series in (self.rest, self.rest_steps, self.rest_tokens):
            series.clear()
        findings = name_suspects(look, self._roots(frame), self.model)
        self.verdict = next(iter(findings), None)
        faults = [finding for finding in findings if finding.is_fault]
        if faults:
            self._suspects = (look, faults)
        self._next_look = 2 * step + FIRST_SUSPICION if self.mode == "auto" else sys.maxsize

    def confirmed(self) -> list[Finding]:
        """Return what a look found, unless most of it has gone since: then it was a buffer with a limit."""
        if self._suspects is None:
            return []
        look, faults = self._suspects
        alive = [birth for birth in look.survivors if birth.is_alive]
        if look.survivors and len(alive) < 0.5 * len(look.survivors):
            faults = [finding for finding in faults if finding.cause not in GONE_IS_HARMLESS]
        return faults

    def _roots(self, frame: FrameType | None) -> list[Root]:
        roots = roots_of_frame(frame) + self.roots
        if self.model is not None:
            roots.append(Root("model", "model", self.model))
        if self.optimizer is not None:
            roots.append(Root("optimizer", "optimizer", self.optimizer))
        return roots + roots_of_process()
