"""Faults that are switched on in a loop of the user's own, one function per cause; each returns what undoes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...diagnose.causes import CAUSES
from ...observe.storages import tensors_in

Undo = Callable[[], None]
HUGE = 1000.0


class Fault:
    """A fault that is switched on: what it collects is an attribute here, so that its holder can be named.

    Attributes:
        cause: Identifier of the cause.
        total: A running total, where the fault keeps one.
        kept: What the fault collects.
        num_forwards: Forward passes so far.
        is_due: Whether this forward pass is the one at which a fault of one step strikes.
    """

    def __init__(self, cause: str, model: nn.Module, optimizer: Any, at_step: int) -> None:
        self.cause, self.model, self.optimizer, self.at_step = cause, model, optimizer, at_step
        self.total: Any = 0.0
        self.kept: list[Any] = []
        self.num_forwards = 0
        self.is_due = False
        self._struck: Tensor | None = None

    def enter(self, inputs: Tensor | None) -> None:
        """Count a forward pass; a fault of one step strikes at its step and whenever its batch comes again."""
        self.num_forwards += 1
        if self.num_forwards == self.at_step and inputs is not None:
            self._struck = inputs.clone()
        self.is_due = (
            self._struck is not None
            and inputs is not None
            and inputs.shape == self._struck.shape
            and torch.equal(inputs, self._struck)
        )


Maker = Callable[[Fault], list[Undo]]
_MAKERS: dict[str, Maker] = {}


def _cause(name: str) -> Callable[[Maker], Maker]:
    def add(maker: Maker) -> Maker:
        if name not in CAUSES:
            raise KeyError(name)
        _MAKERS[name] = maker
        return maker

    return add


def switches() -> list[str]:
    """Return the causes whose fault can be switched on in any loop."""
    return sorted(_MAKERS)


@contextlib.contextmanager
def switch_on(cause: str, model: nn.Module, optimizer: Any = None, *, at_step: int = 4) -> Iterator[Fault]:
    """Switch a fault on for the length of a block.

    Args:
        cause: One of ``switches()``.
        model: The model that trains; its outputs must have a ``loss`` for faults of the loss.
        optimizer: Its optimizer, where the fault concerns it.
        at_step: Forward pass, counted from 1, at which a fault of a single step strikes.

    Yields:
        The fault; it holds what it collects.

    Raises:
        ValueError: No such fault.
    """
    if cause not in _MAKERS:
        raise ValueError(
            f"{cause!r} cannot be switched on in a loop of your own. Those that can: {', '.join(switches())}."
        )
    fault = Fault(cause, model, optimizer, at_step)

    def count(module: nn.Module, args: Any, kwargs: Any) -> None:
        fault.enter(next(tensors_in([list(args), dict(kwargs)]), None))

    undo: list[Undo] = [model.register_forward_pre_hook(count, with_kwargs=True).remove]
    try:
        undo += _MAKERS[cause](fault)
        yield fault
    finally:
        for action in reversed(undo):
            action()
        fault.kept.clear()
        fault.total = 0.0


def _loss_of(output: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, dict) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor):
        raise ValueError("This fault changes the loss, and the model returns none. Pass labels to the model.")
    return loss


def _change_loss(fault: Fault, change: Callable[[Tensor], Tensor]) -> list[Undo]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not fault.is_due:
            return output
        if isinstance(output, Tensor):
            return change(output)
        output["loss"] = change(_loss_of(output))
        return output

    return [fault.model.register_forward_hook(hook).remove]


@_cause("leak.graph_total")
def _running_total(fault: Fault) -> list[Undo]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        fault.total = fault.total + _loss_of(output).mean()

    return [fault.model.register_forward_hook(hook).remove]


@_cause("leak.graph_kept")
def _losses_kept(fault: Fault) -> list[Undo]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        fault.kept.append(_loss_of(output))

    return [fault.model.register_forward_hook(hook).remove]


@_cause("leak.kept_tensors")
def _outputs_kept(fault: Fault) -> list[Undo]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        value = output if isinstance(output, Tensor) else output["logits"]
        fault.kept.append(value.detach())

    return [fault.model.register_forward_hook(hook).remove]


@_cause("leak.hook_buffer")
def _activations_kept(fault: Fault) -> list[Undo]:
    module = next(item for item in fault.model.modules() if isinstance(item, nn.Linear))
    buffer: list[Tensor] = []
    module.__dict__["clinic_activations"] = buffer

    def hook(inner: nn.Module, args: Any, output: Tensor) -> None:
        buffer.append(output.detach())

    return [lambda: module.__dict__.pop("clinic_activations"), module.register_forward_hook(hook).remove]


@_cause("nonfinite.log_of_zero")
def _log_of_zero(fault: Fault) -> list[Undo]:
    return _change_loss(fault, lambda loss: loss - torch.log(torch.sigmoid(loss * 0 - 200).clamp(max=1e-30) * 1e-30))


@_cause("nonfinite.clipping")
def _infinite_gradient(fault: Fault) -> list[Undo]:
    parameter = next(item for item in fault.model.parameters() if item.requires_grad)

    def hook(gradient: Tensor) -> Tensor:
        if not fault.is_due:
            return gradient
        bad = gradient.clone()
        bad.view(-1)[0] = float("inf")
        return bad

    # A replay runs the same hook and shows the same gradient; it is no operator that made it.
    return [parameter.register_hook(hook).remove]


@_cause("nonfinite.embedding_row")
def _nan_row(fault: Fault) -> list[Undo]:
    layer = next(item for item in fault.model.modules() if isinstance(item, nn.Embedding))
    before = layer.weight.detach().clone()

    def hook(module: nn.Module, args: Any) -> None:
        if fault.is_due:
            with torch.no_grad():
                layer.weight[int(args[0].flatten()[0])] = float("nan")

    def restore() -> None:
        bad = ~torch.isfinite(layer.weight.detach()).all(1)
        with torch.no_grad():
            layer.weight[bad] = before[bad]

    return [restore, layer.register_forward_pre_hook(hook).remove]


@_cause("loss.outlier_batch")
def _outlier(fault: Fault) -> list[Undo]:
    return _change_loss(fault, lambda loss: loss * HUGE)


@_cause("data.ids_out_of_range")
def _foreign_token(fault: Fault) -> list[Undo]:
    layer = next(item for item in fault.model.modules() if isinstance(item, nn.Embedding))

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if fault.is_due and isinstance(kwargs.get("input_ids"), Tensor):
            ids = kwargs["input_ids"]
            ids[-1, -1] = layer.num_embeddings
        return args, kwargs

    return [fault.model.register_forward_pre_hook(hook, with_kwargs=True).remove]


@_cause("model.no_trainable")
def _frozen(fault: Fault) -> list[Undo]:
    trained = [parameter for parameter in fault.model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)

    def restore() -> None:
        for parameter in trained:
            parameter.requires_grad_(True)

    return [restore]


@_cause("model.optimizer_misses")
def _forgotten(fault: Fault) -> list[Undo]:
    if fault.optimizer is None:
        raise ValueError("This fault takes parameters out of the optimizer; give it one.")
    group = fault.optimizer.param_groups[0]
    before = list(group["params"])
    group["params"] = before[: len(before) // 2]

    def restore() -> None:
        group["params"] = before

    return [restore]
