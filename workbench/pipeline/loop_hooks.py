"""Hooks on a model and an optimizer that a loop does not know: phases, kept inputs, gradient norm, blocked updates.

All of them are cheap: a few attribute writes a forward pass, one copy of the CPU's random state (5 kB), and a gradient
norm only where the loop does not compute one by clipping.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..observe.storages import tensors_in

MAX_KEPT = 64  # Micro-batches of one step whose inputs are kept for a replay.


@dataclass
class MicroBatch:
    """One forward pass: what is needed to run it again.

    Attributes:
        args: Positional inputs of the model (references).
        kwargs: Named inputs.
        rng_state: CPU random state before it.
        cuda_rng_state: Device random state before it, or None.
        num_tokens: Token slots; 0 when the input has no ids.
        num_rows: Rows.
        loss: The model's own loss, detached, or None.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng_state: Tensor
    cuda_rng_state: Tensor | None
    num_rows: int = 0
    num_tokens: int = 0
    loss: Tensor | None = None
    had_grad: bool = True


@dataclass
class StepFacts:
    """What the hooks saw since the last border."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    grad_norm: float | None = None
    was_clipped: bool = False
    bad_gradients: list[str] = field(default_factory=list)
    num_updates: int = 0
    learning_rate: float | None = None  # Of the update; a schedule has moved on at the border.
    was_blocked: bool = False
    num_eval_forwards: int = 0
    num_training_mode_eval: int = 0  # Of those, in training mode: by the border the loop may have set it again.


class LoopHooks:
    """Registers and removes the hooks; ``facts`` is read and renewed at each border."""

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Any,
        *,
        on_phase: Callable[[str], None],
        on_update: Callable[[StepFacts], None],
        on_output: Callable[[Any], None],
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.facts = StepFacts()
        self.phase = "between"
        self.is_replaying = False
        self.use_scaler = False
        self._on_phase = on_phase
        self._on_update = on_update
        self._on_output = on_output
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._kept_gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._own: set[int] | None = None

    def attach(self, *, sees_forward: bool = True) -> None:
        """Register everything; without ``sees_forward`` the caller tells of forward passes by ``note_forward``."""
        if self.model is not None and sees_forward:
            self._handles.append(self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True))
            self._handles.append(self.model.register_forward_hook(self._after_forward))
        if self.optimizer is not None and hasattr(self.optimizer, "register_step_pre_hook"):
            self._handles.append(self.optimizer.register_step_pre_hook(self._before_update))
            self._handles.append(self.optimizer.register_step_post_hook(self._after_update))
        self._watch_clipping()

    def detach(self) -> None:
        """Remove everything."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._kept_gradients.clear()

    def take(self) -> StepFacts:
        """Return the facts since the last border and begin anew."""
        facts, self.facts = self.facts, StepFacts()
        self._kept_gradients.clear()
        self._set_phase("between")
        return facts

    def _set_phase(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._on_phase(phase)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.note_forward(args, kwargs)

    def note_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what is needed to run a forward pass again that is about to begin."""
        if self.is_replaying:
            return
        with_grad = torch.is_grad_enabled()
        self._set_phase("forward" if with_grad else "evaluation")
        first = kwargs.get("input_ids")
        if not isinstance(first, Tensor):
            first = next(tensors_in([kwargs.get("inputs_embeds"), args, list(kwargs.values())]), None)
        rows = int(first.shape[0]) if first is not None and first.ndim else 0
        tokens = int(first.shape[0] * first.shape[1]) if first is not None and first.ndim > 1 else rows
        if not with_grad:
            self.facts.num_eval_forwards += 1
            self.facts.num_training_mode_eval += self.model is not None and self.model.training
        if len(self.facts.micro_batches) < MAX_KEPT:
            on_cuda = first is not None and first.device.type == "cuda"
            cuda_state = torch.cuda.get_rng_state(first.device) if on_cuda and first is not None else None
            self.facts.micro_batches.append(
                MicroBatch(args, kwargs, torch.get_rng_state(), cuda_state, rows, tokens, had_grad=with_grad)
            )

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.is_replaying:
            return
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and self.facts.micro_batches:
            self.facts.micro_batches[-1].loss = loss.detach()
        self._on_output(output)
        self._set_phase("loss" if torch.is_grad_enabled() else "between")

    def own_parameters(self) -> dict[int, str]:
        """Return the names of the watched parameters by ``id``."""
        if self.model is not None:
            return {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = getattr(self.optimizer, "param_groups", [])
        return {
            id(p): f"param_groups[{g}][{i}]" for g, group in enumerate(groups) for i, p in enumerate(group["params"])
        }

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer updates, or those that train where there is none."""
        if self.optimizer is not None:
            return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [p for p in self.model.parameters() if p.requires_grad] if self.model is not None else []

    def _before_update(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check the update that comes; one with a closure has no gradients yet, so its closure is wrapped."""
        place = next((index for index, value in enumerate(args) if index and callable(value)), None)
        closure = kwargs.get("closure") if place is None else args[place]
        if closure is None:
            self._check_update(optimizer)
            return None

        def closure_then_check() -> Any:
            result = closure()
            self._check_update(optimizer)
            return result

        if place is None:
            return args, {**kwargs, "closure": closure_then_check}
        return (*args[:place], closure_then_check, *args[place + 1 :]), kwargs

    def _check_update(self, optimizer: Any) -> None:
        if self.is_replaying:
            self._block(optimizer)
            return
        self._set_phase("optimizer")
        facts = self.facts
        facts.num_updates += 1
        groups = optimizer.param_groups
        facts.learning_rate = float(groups[0]["lr"]) if groups and "lr" in groups[0] else None
        if facts.grad_norm is None:
            gradients = [parameter.grad for parameter in self.trained() if parameter.grad is not None]
            facts.grad_norm = _norm(gradients)
        if not math.isfinite(facts.grad_norm):
            self._note_bad()
            facts.was_blocked = True
            self._block(optimizer)
        else:
            self._on_update(facts)

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._set_phase("between")
        if self._kept_gradients and not self.is_replaying:
            for parameter, gradient in self._kept_gradients:
                parameter.grad = gradient
            self._kept_gradients.clear()

    def _block(self, optimizer: Any) -> None:
        """Take the gradients away: an optimizer passes over parameters without one, and keeps its state."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._kept_gradients.append((parameter, parameter.grad))
                    parameter.grad = None

    def _note_bad(self) -> None:
        if self.facts.bad_gradients:
            return
        names = self.own_parameters()
        for parameter in self.trained():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                self.facts.bad_gradients.append(names.get(id(parameter), "parameter"))

    def _watch_clipping(self) -> None:
        """Read the norm that clipping computes anyway; torch looks its function up at each call."""
        module = torch.nn.utils.clip_grad
        name = "_get_total_norm" if hasattr(module, "_get_total_norm") else "get_total_norm"
        original = getattr(module, name)
        me = weakref.ref(self)

        def read_norm(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
            hooks = me()
            if hooks is not None and not hooks.is_replaying:
                hooks._set_phase("clipping")
            norm: Tensor = original(tensors, *args, **kwargs)
            if hooks is not None and not hooks.is_replaying:
                hooks.take_norm(norm)
            return norm

        setattr(module, name, read_norm)

        def undo() -> None:
            if getattr(module, name) is read_norm:
                setattr(module, name, original)

        self._undo.append(undo)

    def take_norm(self, norm: Tensor) -> None:
        """Note the norm of a clipping call; a bad one is traced to its parameters before clipping spreads it."""
        self.facts.grad_norm = float(norm)
        self.facts.was_clipped = True
        if not math.isfinite(self.facts.grad_norm):
            self._note_bad()


def _norm(gradients: list[Tensor]) -> float:
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    if not dense:
        return 0.0
    norms = torch._foreach_norm(dense)
    if any(norm.dtype != torch.float32 for norm in norms):
        norms = tuple(norm.float() for norm in norms)
    return float(torch.linalg.vector_norm(torch.stack(norms)))
