"""Watches a Lightning Trainer: the doctors fed by a callback, for ``lightning`` and ``pytorch_lightning`` alike.

::

    trainer = lightning.Trainer(max_steps=100)
    w = workbench.watch(trainer)
    trainer.fit(module, loader)
    print(w.report())

Lightning calls the optimizer with a closure that runs forward and backward, so the check of an update sits behind that
closure (``loop_hooks``). The module's ``forward`` is often not what trains; the batch is therefore taken at its start.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MissingPackageError
from ..events import Observer
from ..observe.holders import Root
from .outer_watch import OuterWatch
from .replay import Rerun
from .watching import Watch

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


# Nodes below the loss that are marked: its division by the batches, and what the module returned.
MARKED_NODES = 3


class LightningEvents(OuterWatch):
    """What the callback does; the class with Lightning's own base is made by ``callback_class``."""

    begins_with = "fit"

    def __init__(
        self, *, limit: str | int | None = None, look: str = "auto", observers: Sequence[Observer] = ()
    ) -> None:
        super().__init__(limit, look, observers)
        self._losses: list[Tensor] = []
        self._batch: tuple[Any, int] = (None, 0)

    # -- what Lightning calls ----------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the watch when the module has made its optimizer."""
        if self.watch is not None:
            self._before += self.watch.findings
        optimizers = list(trainer.optimizers)
        self.watch = Watch(pl_module, optimizers[0] if optimizers else None, **self._options)
        self.watch.observers += self._observers
        self.watch.memory.roots = [Root("trainer", "variable", trainer), Root("module", "variable", pl_module)]
        self.watch.rerun_override = Rerun(lambda batch: self._loss_again(pl_module, batch), None)
        self.watch.begin(sees_forward=False)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the batch and the random state, so that the step can be run again."""
        if self.watch is None:
            return
        self._batch = (batch, batch_idx)
        self.watch.rerun_override.batch = batch
        is_named = hasattr(batch, "items")
        arguments = () if is_named else tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
        self.watch.hooks.note_forward(arguments, dict(batch.items()) if is_named else {})

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Mark the graph below the loss: Lightning calls no forward of the module, and divides the loss it is given."""
        node: Any = loss.grad_fn
        for _ in range(MARKED_NODES):
            # Gradient accumulators live as long as their parameters.
            if self.watch is None or node is None or type(node).__name__ == "AccumulateGrad":
                return
            self.watch.memory.marks.lay_node(node)
            node = next((one for one, _ in node.next_functions if one is not None), None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step where the optimizer has run; batches of an accumulation before that are only counted."""
        if self.watch is None:
            return
        loss = outputs.get("loss") if hasattr(outputs, "get") else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())
            self.watch.memory.marks.lay([loss])
        facts = self.watch.hooks.facts
        if not facts.num_updates and len(facts.micro_batches) < int(getattr(trainer, "accumulate_grad_batches", 1)):
            return
        # Lightning divides the loss of each batch by their number: the sum is the mean.
        total = torch.stack([part.float().cpu() for part in self._losses]).sum() if self._losses else None
        self._losses.clear()
        self.watch.border(total, batch, sys._getframe(1))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Complete the findings."""
        self._finish(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Explain what left ``fit``."""
        self._finish(exception)

    # -- inside ------------------------------------------------------------------------------------------------

    def _finish(self, error: BaseException | None) -> None:
        if self.watch is not None:
            self.watch.finish(error, sys._getframe(2))
        self._batch = (None, 0)
        self._losses.clear()

    def _loss_again(self, module: Any, batch: Any) -> Tensor:
        kept, index = self._batch
        with _unlogged(module):
            result = module.training_step(kept if batch is None else batch, index)
        loss = result["loss"] if hasattr(result, "items") else result
        if not isinstance(loss, Tensor):
            raise TypeError("training_step returned no loss")
        return loss


@contextlib.contextmanager
def _unlogged(module: nn.Module) -> Iterator[None]:
    """Keep a replay out of the user's logs."""
    names = ("log", "log_dict")
    for name in names:
        module.__dict__[name] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for name in names:
            module.__dict__.pop(name, None)


def callback_class(package: str) -> Any:
    """Return the callback's class for one of the two packages; each accepts only callbacks of its own base."""
    base = importlib.import_module(f"{package}.callbacks").Callback
    return type("LightningWatch", (LightningEvents, base), {"__doc__": LightningEvents.__doc__})


def watch_lightning(trainer: Any, **options: Any) -> Any:
    """Add the callback to a Lightning Trainer and return it."""
    module = type(trainer).__module__
    package = next((name for name in PACKAGES if module.startswith(f"{name}.")), None)
    if package is None:
        raise TypeError(
            f"watch() got a {module}.{type(trainer).__name__}, which has fit() but is no Lightning Trainer."
        )
    callback = callback_class(package)(**options)
    trainer.callbacks.append(callback)
    return callback


def lightning_callback(**options: Any) -> Any:
    """Return a callback for ``Trainer(callbacks=[...])``; options as for ``watch``.

    Raises:
        MissingPackageError: Neither ``lightning`` nor ``pytorch_lightning`` is installed.
    """
    for package in PACKAGES:
        with contextlib.suppress(ModuleNotFoundError):
            return callback_class(package)(**options)
    raise MissingPackageError("pytorch-lightning", "Watching a Lightning Trainer", extra="lightning")
