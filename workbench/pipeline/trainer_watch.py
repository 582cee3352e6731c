"""Watches a transformers or TRL Trainer: the same doctors, fed by the trainer's own borders.

``training_step`` and ``train`` of this one trainer object are wrapped, so that the raw loss is seen before any filter,
the failing batch can be run again the trainer's way, and an exception that leaves ``train()`` is explained.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..diagnose.finding import make_finding
from ..events import Observer
from ..observe.holders import Root
from .outer_watch import OuterWatch
from .replay import Rerun
from .watching import Watch


class TrainerWatch(OuterWatch):
    """The watch of one Trainer, from each ``train()`` to its end."""

    def __init__(
        self, trainer: Any, *, limit: str | int | None = None, look: str = "auto", observers: Sequence[Observer] = ()
    ) -> None:
        super().__init__(limit, look, observers)
        self.trainer = trainer
        self._losses: list[Tensor] = []
        self._inputs: Any = None
        self._train = trainer.train
        self._training_step = trainer.training_step
        # The trainer looks at the signature of neither; plain functions keep their names in tracebacks.
        trainer.train = self._watched_train
        trainer.training_step = self._watched_training_step
        trainer.add_callback(_Borders(self))

    def close(self) -> None:
        """Give the trainer its own methods back."""
        self.trainer.train, self.trainer.training_step = self._train, self._training_step
        for callback in [item for item in self.trainer.callback_handler.callbacks if isinstance(item, _Borders)]:
            self.trainer.remove_callback(callback)

    def begin(self, optimizer: Any) -> None:
        """Open the watch when the trainer has made its optimizer."""
        inner = getattr(optimizer, "optimizer", optimizer)
        if self.watch is not None:
            self._before += self.watch.findings
        self.watch = Watch(self.trainer.model, inner, **self._options)
        self.watch.observers += self._observers
        self.watch.memory.roots = [Root("trainer", "variable", self.trainer)]
        self.watch.rerun_override = Rerun(self._loss_again, None)
        self.watch.__enter__()

    def border(self, frame: FrameType | None) -> None:
        """One optimizer step is over."""
        if self.watch is None:
            return
        loss = torch.stack([loss.detach().float().cpu() for loss in self._losses]).sum() if self._losses else None
        self._losses.clear()
        self.watch.border(loss, self._inputs, frame)
        hides = getattr(self.trainer.args, "logging_nan_inf_filter", False)
        if loss is not None and not math.isfinite(float(loss)) and hides:
            step, steps = self.watch.num_steps, self.trainer.args.logging_steps
            self.watch.add(
                make_finding(
                    "nonfinite.hidden_by_filter",
                    f"The loss of step {step} is {float(loss)}, but the Trainer's log will show 0 or "
                    f"the running mean in "
                    "its place (logging_nan_inf_filter=True).",
                    where={"step": step},
                    evidence={"loss": float(loss), "logging_steps": steps},
                    confidence=1.0,
                )
            )

    def _loss_again(self, batch: Any) -> Tensor:
        inputs = dict(self._inputs if batch is None else batch)
        with self.trainer.compute_loss_context_manager():
            loss: Tensor = self.trainer.compute_loss(self.trainer.model, inputs)
        return loss

    def _watched_training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        self._inputs = dict(inputs) if hasattr(inputs, "items") else inputs
        if self.watch is not None and self.watch.rerun_override is not None:
            self.watch.rerun_override.batch = self._inputs
        loss: Tensor = self._training_step(model, inputs, *args, **kwargs)
        self._losses.append(loss.detach())
        return loss

    def _watched_train(self, *args: Any, **kwargs: Any) -> Any:
        error: BaseException | None = None
        try:
            return self._train(*args, **kwargs)
        except BaseException as caught:
            error = caught
            raise
        finally:
            if self.watch is not None:
                self.watch.finish(error, sys._getframe(1))
            self._inputs = None
            error = None  # A local that holds its own traceback would keep every frame alive.


class _Borders(TrainerCallback):
    def __init__(self, owner: TrainerWatch) -> None:
        self.owner = owner

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.owner.begin(kwargs.get("optimizer"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.owner.border(sys._getframe(1))
