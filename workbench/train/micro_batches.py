"""Micro-batches that do not fit are cut in halves, in the same step of the same run; the effective batch stays.

The loss of a part is divided by the tokens of the whole step, so that the parts of a micro-batch add up to it: the
gradients are those of the uncut micro-batch up to the rounding of sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..hardware import Device
from ..recipe import Recipe
from .checkpoint import random_state, set_random_state
from .explain import is_out_of_memory
from .teardown import chain_of, collect_memory, let_go

Batch = Mapping[str, Tensor]

# Share of the capacity up to which ``adapt_micro_batch`` fills the device with what it expects. The rest is for what
# does not grow with the tokens: fragments of memory and the workspaces of kernels.
HEADROOM_FRACTION = 0.9


class MicroBatches:
    """Runs micro-batches, whole or in parts, as ``policies.on_oom`` says.

    Attributes:
        parts: Into how many parts a micro-batch is cut now.
    """

    def __init__(self, recipe: Recipe, capacity_bytes: int) -> None:
        """Make the parts of a run.

        Args:
            recipe: Says the policy.
            capacity_bytes: What the device, or the one it pretends to be, offers the allocator.
        """
        self._policy = recipe.policies.on_oom
        self._capacity_bytes = capacity_bytes
        self.parts = 1
        self._done: list[Batch] = []
        self._random_state: dict[str, Any] = {}
        self._smallest_failed = 0  # Token slots of the smallest part that did not fit; 0: all did.
        self._slots_of_step = 0  # Of the largest part of the step.
        self._bytes_per_slot = 0.0
        self._rest_bytes = 0.0
        self._running: Batch | None = None

    @property
    def is_active(self) -> bool:
        """Whether a micro-batch that does not fit is cut instead of ending the run."""
        return self._policy != "stop"

    def begin_step(self, rows: int, slots: int) -> int | None:
        """Note where a step begins; returns the parts from now on where room for larger ones is found, else None.

        Args:
            rows: Rows of its largest micro-batch.
            slots: Token slots of it, padding included.
        """
        self._done, self._slots_of_step = [], 0
        if not self.is_active:
            return None
        self._random_state = random_state()
        if self._policy != "adapt_micro_batch" or self.parts == 1 or not self._bytes_per_slot:
            return None
        for parts in _powers(self.parts):
            size = -(-rows // parts) * (slots // max(1, rows))
            fits = size * self._bytes_per_slot <= HEADROOM_FRACTION * self._capacity_bytes - self._rest_bytes
            if fits and (not self._smallest_failed or size < self._smallest_failed):
                self.parts = parts
                return parts
        return None

    def run(self, batch: Batch, compute: Callable[[Batch], Tensor], drop_gradients: Callable[[], None]) -> Tensor:
        """Run forward and backward of one micro-batch; returns its detached loss.

        Where a part does not fit, the gradients of the step are dropped and all its micro-batches so far come again
        from the random state in which it began, in parts half as large.

        Args:
            batch: Tensors on the device.
            compute: Runs one part, adds its gradients and returns its detached loss.
            drop_gradients: Forgets the gradients of the step.

        Raises:
            torch.OutOfMemoryError: A part of one row does not fit, or the policy is to stop.
        """
        if not self.is_active:
            return compute(batch)
        self._done.append(batch)
        pending = [batch]
        while True:
            failed: Batch | None = None
            try:
                for each in pending:
                    loss = self._run_parts(each, compute)
                return loss
            except Exception as error:
                failed = self._running
                if not is_out_of_memory(error) or failed is None or failed["input_ids"].shape[0] < 2:
                    raise
                for link in chain_of(error):
                    let_go(link)  # Its frames hold the activations.
            drop_gradients()
            self._slots_of_step = 0
            slots = failed["input_ids"].numel()
            self._smallest_failed = min(self._smallest_failed or slots, slots)
            self.parts *= 2
            failed = self._running = None
            collect_memory()
            set_random_state(self._random_state)
            pending = list(self._done)

    def _run_parts(self, batch: Batch, compute: Callable[[Batch], Tensor]) -> Tensor:
        total: Tensor | None = None
        for part in cut(batch, self.parts):
            self._running = part
            self._slots_of_step = max(self._slots_of_step, part["input_ids"].numel())
            loss = compute(part)
            total = loss if total is None else total + loss
        self._running = None
        assert total is not None  # A batch has a row.
        return total

    def end_step(self, row: Mapping[str, Any]) -> None:
        """Learn from the measured memory of a step what a token slot takes.

        Args:
            row: The step's metrics.
        """
        rest, peak = row.get("allocated_bytes"), row.get("peak_allocated_bytes")
        self._done = []
        if rest is None or peak is None or not self._slots_of_step:
            return
        self._rest_bytes = float(rest)
        self._bytes_per_slot = max(self._bytes_per_slot, (peak - rest) / self._slots_of_step)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain JSON values."""
        return {
            "parts": self.parts,
            "smallest_failed": self._smallest_failed,
            "bytes_per_slot": self._bytes_per_slot,
            "rest_bytes": self._rest_bytes,
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from ``state()``; None, of a checkpoint that has none, begins anew. Does nothing when inactive."""
        if state and self.is_active:
            self.parts, self._smallest_failed = int(state["parts"]), int(state["smallest_failed"])
            self._bytes_per_slot, self._rest_bytes = float(state["bytes_per_slot"]), float(state["rest_bytes"])


def cut(batch: Batch, parts: int) -> list[Batch]:
    """Return a batch in up to ``parts`` pieces of whole rows, each without the columns that are padding in all of it.

    Args:
        batch: Tensors whose first dimension is the rows; ``input_ids`` and what has its shape may lose padding on
            either side, an ``attention_mask`` says where it is.
        parts: How many; fewer where there are fewer rows.
    """
    rows = batch["input_ids"].shape[0]
    if parts == 1 or rows == 1:
        return [batch]
    size = -(-rows // parts)
    return [
        _trimmed({name: value[first : first + size] for name, value in batch.items()}) for first in range(0, rows, size)
    ]


def _trimmed(part: dict[str, Tensor]) -> dict[str, Tensor]:
    mask, ids = part.get("attention_mask"), part["input_ids"]
    if mask is None or mask.shape != ids.shape:
        return part
    used = mask.any(dim=0).nonzero().flatten()
    if not len(used):
        return part
    first, end = int(used[0]), int(used[-1]) + 1
    trimmed = {name: value[:, first:end] if value.shape == ids.shape else value for name, value in part.items()}
    if bool(trimmed["attention_mask"].all()):
        del trimmed["attention_mask"]  # As the collator does: a mask changes the kernel.
    return trimmed


def _powers(limit: int) -> list[int]:
    """Return 1, 2, 4, ... below ``limit``."""
    found, power = [], 1
    while power < limit:
        found.append(power)
        power *= 2
    return found


def capacity_of(device: Device) -> int:
    """Return the bytes that a device's allocator may take."""
    return max(0, device.capacity_bytes - device.context_bytes)


def batch_event(step: int, rows: int, steps: int, reason: str) -> dict[str, Any]:
    """Return the data of a ``"batch"`` event.

    Args:
        step: Optimizer step in which it changed.
        rows: Rows of a micro-batch, or of a part of one, from now on.
        steps: Forward passes of an optimizer step from now on.
        reason: Why, as the begin of a sentence.
    """
    return {
        "step": step,
        "micro_batch_size": rows,
        "gradient_accumulation_steps": steps,
        "message": f"Step {step}: {reason} From now on {rows} samples in a forward pass, {steps} passes a step.",
    }


def largest(batches: list[dict[str, Any]]) -> tuple[int, int]:
    """Return rows and token slots of the largest micro-batch of a step; 0 where there is none."""
    sizes = [(batch["input_ids"].shape[0], batch["input_ids"].numel()) for batch in batches]
    return max(sizes, key=lambda size: size[1], default=(0, 0))


def squared_norm(parameters: list[torch.nn.Parameter]) -> Tensor:
    """Return the squared norm of all gradients, a float32 scalar."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(grads).float() ** 2
