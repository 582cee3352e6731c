"""The first operator that turns finite numbers into NaN or Inf, forward and backward: for one replayed step.

Anomaly mode names where a NaN surfaces in backward; a loss that is Inf passes it silently. This mode looks at inputs
and outputs of every operator instead. It costs several times the step, so it runs on a replay only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .storages import tensors_in, user_line

# Make -inf or leave memory as it was on purpose: masks, fills and buffers that are written later.
_FILLS = (
    "masked_fill",
    "full",
    "empty",
    "where",
    "fill_",
    "triu",
    "tril",
    "new_",
    "scalar_tensor",
    "zero_",
    "index_put",
)


@dataclass(slots=True)
class BadOp:
    """An operator whose inputs were better than its output.

    Attributes:
        op: Name, e.g. ``"aten.mm"``.
        module: Innermost module.
        phase: ``"forward"`` or ``"backward"``.
        line: ``file:line`` in the user's code.
        value: ``"nan"``, ``"inf"`` or ``"-inf"``: the worst in the output.
        node: Autograd node in backward.
        dtype: Dtype of the output.
        shape: Shape of the output.
        largest_input: Largest magnitude among the finite inputs.
        smallest_input: Smallest magnitude.
        index: Position of the first bad value.
        all_masked_rows: Rows of a softmax whose inputs are all -inf.
        index_inputs: Values of integer inputs at the bad position (token ids of an embedding).
        has_zero_operand: A divisor or the argument of a logarithm is exactly 0.
        fp32_largest: Largest magnitude of the output when computed in float32, where that was tried.
    """

    op: str
    module: str
    phase: str
    line: str
    value: str
    node: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    largest_input: float = 0.0
    smallest_input: float = 0.0
    index: tuple[int, ...] = ()
    all_masked_rows: int = 0
    index_inputs: tuple[int, ...] = ()
    has_zero_operand: bool = False
    fp32_largest: float | None = None
    bad_parameters: tuple[str, ...] = ()


@dataclass(eq=False)
class FinitenessMode(TorchDispatchMode):
    """Collects operators that made NaN or Inf.

    Attributes:
        created: Inputs finite, output not; fills left out.
        masked: The fills: seen, harmless by themselves.
        first_nan: First operator with NaN out and none in.
    """

    model: nn.Module | None = None
    created: list[BadOp] = field(default_factory=list)
    masked: list[BadOp] = field(default_factory=list)
    first_nan: BadOp | None = None
    max_forward: float = 0.0
    module_inputs: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stack: list[str] = []
        self._hooks: list[Any] = []
        self._nodes: dict[Any, str] = {}
        self._bad_parameters: dict[int, str] = {}

    def __enter__(self) -> FinitenessMode:
        if self.model is not None:
            for name, parameter in self.model.named_parameters():
                if not bool(torch.isfinite(parameter.detach()).all()):
                    self._bad_parameters[parameter.data_ptr()] = name
            for name, module in self.model.named_modules():
                self._hooks.append(module.register_forward_pre_hook(lambda m, a, name=name: self._stack.append(name)))
                self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._stack.pop() if self._stack else ""
        border = {tensor.grad_fn for tensor in tensors_in(args) if tensor.grad_fn is not None}
        queue = [tensor.grad_fn for tensor in tensors_in(_plain(output)) if tensor.grad_fn is not None]
        while queue:
            node = queue.pop()
            if node in self._nodes or node in border:
                continue
            self._nodes[node] = name
            queue += [child for child, _ in node.next_functions if child is not None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func.name()).replace("::", ".")
        before = [_state(tensor) for tensor in _floats([args, kwargs])] if func._schema.is_mutable else None
        result = func(*args, **kwargs)
        if getattr(func, "is_view", False) or "is" in name.split(".")[1][:2]:
            return result
        outputs = [(tensor, _state(tensor)) for tensor in _floats(result)]
        bad = next(((tensor, state) for tensor, state in outputs if state != "finite"), None)
        in_backward = torch._C._current_graph_task_id() != -1
        if bad is None:
            if not in_backward and outputs and outputs[0][0].numel():
                self.max_forward = max(self.max_forward, float(outputs[0][0].detach().abs().max()))
            return result
        tensor, state = bad
        inputs = list(_floats([args, kwargs]))
        states = before if before is not None else [_state(value) for value in inputs]
        was_clean = all(item == "finite" for item in states)
        no_nan = "nan" not in states
        if not was_clean and not (state == "nan" and no_nan and self.first_nan is None):
            own = [
                self._bad_parameters[value.data_ptr()] for value in inputs if value.data_ptr() in self._bad_parameters
            ]
            if not own or self.first_nan is not None:
                return result
        entry = self._describe(name, tensor, state, inputs, args, in_backward)
        is_fill = any(word in name for word in _FILLS)
        if was_clean and is_fill and not torch.isnan(tensor).any():
            self.masked.append(entry)
            return result
        if state == "nan" and self.first_nan is None:
            self.first_nan = entry
        if (was_clean or entry.bad_parameters) and len(self.created) < 100:
            if was_clean and tensor.dtype in (torch.float16, torch.bfloat16):
                entry.fp32_largest = _in_float32(func, args, kwargs)
            self.created.append(entry)
        return result

    def _describe(
        self, name: str, tensor: Tensor, state: str, inputs: list[Tensor], args: Any, in_backward: bool
    ) -> BadOp:
        finite = [value.detach().float()[torch.isfinite(value)] for value in inputs]
        finite = [value.abs() for value in finite if value.numel()]
        node = torch._C._current_autograd_node() if in_backward else None
        module = self._stack[-1] if self._stack else ""
        if node is not None:
            module = self._nodes.get(node, module)
        where = torch.nonzero(~torch.isfinite(tensor.detach()))
        index = tuple(int(value) for value in where[0]) if len(where) else ()
        masked_rows = 0
        if "softmax" in name and inputs and inputs[0].ndim:
            masked_rows = int(torch.isneginf(inputs[0].detach()).all(-1).sum())
        ids: tuple[int, ...] = ()
        whole = [value for value in tensors_in(args) if not value.is_floating_point()]
        if "embedding" in name and whole:
            positions = {tuple(row[: whole[0].ndim].tolist()) for row in where}
            ids = tuple(sorted({int(whole[0][position]) for position in list(positions)[:100]}))
            first = min(positions) if positions else ()
            index = tuple(int(value) for value in first)
        zero = (
            any(bool((value == 0).any()) for value in inputs)
            if any(w in name for w in ("log", "div", "rec"))
            else False
        )
        return BadOp(
            op=name,
            module=module,
            phase="backward" if in_backward else "forward",
            line=user_line(3),
            value=state,
            node=node.name() if node is not None else "",
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            largest_input=max((float(value.max()) for value in finite), default=0.0),
            smallest_input=min((float(value.min()) for value in finite), default=0.0),
            index=index,
            all_masked_rows=masked_rows,
            index_inputs=ids,
            has_zero_operand=zero,
            bad_parameters=tuple(
                self._bad_parameters[value.data_ptr()] for value in inputs if value.data_ptr() in self._bad_parameters
            ),
        )


def _plain(output: Any) -> Any:
    return list(output.values()) if hasattr(output, "values") and not isinstance(output, Tensor) else output


def _floats(value: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(value) if tensor.is_floating_point() and tensor.numel())


def _state(tensor: Tensor) -> str:
    value = tensor.detach()
    if bool(torch.isfinite(value).all()):
        return "finite"
    if bool(torch.isnan(value).any()):
        return "nan"
    return "inf" if bool(torch.isposinf(value).any()) else "-inf"


def _in_float32(func: Any, args: Any, kwargs: Any) -> float | None:
    """Return the largest magnitude the operator yields on float32 inputs; None where it does not take them."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float() if value.is_floating_point() else value
        if isinstance(value, (list, tuple)):
            return type(value)(wide(item) for item in value)
        return torch.float32 if value in (torch.float16, torch.bfloat16) else value

    try:
        result = func(*wide(args), **{name: wide(value) for name, value in kwargs.items()})
    except (RuntimeError, TypeError, ValueError):
        return None
    first = next(_floats(result), None)
    return None if first is None else float(first.abs().max())
