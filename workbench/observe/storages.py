"""Every storage that is born while the tracker is on: when, by which operator and line, and whether it still lives.

Weak references to tensors die with the Python wrapper; weak references to ``UntypedStorage`` follow the lifetime of the
memory itself, which is what a leak is about. The tracker is a dispatch mode and costs some microseconds an operator, so
it is switched on for a bounded window, never for a whole run.
"""

from __future__ import annotations

import sys
import sysconfig
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..units import format_bytes

_LIBRARY_ROOTS = tuple(
    {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")}
    | {str(Path(torch.__file__).parents[1]), str(Path(__file__).parents[1])}
)
# What the clinic runs stands for a user's own code: its lines and variables are to be named.
_CLINIC = str(Path(__file__).parents[1] / "pipeline" / "clinic")
_is_user_file: dict[str, bool] = {}


@dataclass(slots=True, eq=False)
class Birth:
    """One storage.

    Attributes:
        step: Step in which it was born; -1 for what existed before.
        phase: ``"forward"``, ``"backward"``, ``"optimizer"``, ``"evaluation"`` or ``"between"``.
        op: Operator that made it, e.g. ``"aten.cat"``.
        module: Dotted name of the innermost module, or ``""``.
        line: ``file:line`` of the innermost frame of the user's own code, or ``""``.
        num_bytes: Its size.
        shape: Shape of the tensor that came with it.
    """

    step: int
    phase: str
    op: str
    module: str
    line: str
    num_bytes: int
    shape: tuple[int, ...] = ()
    ref: weakref.ref[Any] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the memory still exists."""
        return self.ref is not None and self.ref() is not None


def is_user_file(filename: str) -> bool:
    """Whether a file is the user's own code: not the standard library, not an installed package, not this one."""
    known = _is_user_file.get(filename)
    if known is None:
        inside = filename.startswith(_LIBRARY_ROOTS) or filename.startswith("<frozen")
        known = _is_user_file[filename] = not inside or filename.startswith(_CLINIC)
    return known


def user_line(depth: int = 1) -> str:
    """Return ``file:line`` of the innermost frame that is the user's own code, or ``""``."""
    frame = sys._getframe(depth)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, dicts and dataclass-like outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


class StorageTracker(TorchDispatchMode):
    """Records births and deaths of storages, and can play a device that is full at ``limit_bytes``.

    Attributes:
        step: Set by the watcher at each border.
        phase: Set by the watcher.
        births: Everything born while the mode was on, in order; at most ``max_births``.
        failure: What was asked for when the limit was crossed, else None.
    """

    def __init__(self, model: nn.Module | None = None, *, limit_bytes: int | None = None, keep_lines: bool = True):
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = 0
        self.phase = "between"
        self.births: list[Birth] = []
        self.max_births = 2_000_000
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self.failure: Birth | None = None
        self.live_at_failure: list[Birth] = []
        self.keys_at_failure: dict[int, int] = {}
        self.mutations: dict[int, str] = {}  # storage key -> line of the last in-place write
        self.module_stack: list[str] = []
        self.grad_at_entry = [True]  # Whether the outermost module was entered with gradients on.
        self._keep_lines = keep_lines
        self._live: dict[int, Birth] = {}
        self._hooks: list[Any] = []
        self._model = model

    def __enter__(self) -> StorageTracker:
        if self._model is not None:
            for name, module in self._model.named_modules():
                self._hooks.append(module.register_forward_pre_hook(_Push(self.module_stack, name, self.grad_at_entry)))
                self._hooks.append(module.register_forward_hook(_Pop(self.module_stack), always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.module_stack.clear()

    def register_existing(self, tensors: Iterable[Tensor]) -> None:
        """Count what exists already, so that it is neither a birth nor missing from the live bytes."""
        for tensor in tensors:
            self._note(tensor, "existing", -1)

    def live(self) -> list[Birth]:
        """Return the storages known to be alive, oldest first."""
        return [birth for birth in self._live.values() if birth.is_alive]

    def birth_of(self, tensor: Tensor) -> Birth | None:
        """Return what is known about a tensor's storage."""
        birth = self._live.get(_key(tensor))
        return birth if birth is not None and birth.is_alive else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            self.failure = self.failure or self._describe(func, 0)
            raise
        if func._schema.is_mutable:
            if self._keep_lines:
                for tensor in tensors_in(args[:1]):
                    self.mutations[_key(tensor)] = user_line(2)
            # An in-place operator may still create storage (a view of a fresh buffer never does).
            return result
        if getattr(func, "is_view", False):
            return result
        inputs: set[int] | None = None
        for tensor in tensors_in(result):
            key = _key(tensor)
            if key in self._live:
                continue
            if inputs is None:
                inputs = {_key(value) for value in tensors_in([args, kwargs or {}])}
            if key in inputs:  # An alias of something born before the window, e.g. of a weight.
                self._note(tensor, "existing", -1)
            else:
                self._born(tensor, func)
        return result

    def _born(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if self.limit_bytes is not None and self.live_bytes + num_bytes > self.limit_bytes:
            self.failure = self._describe(func, num_bytes)
            self.failure.shape = tuple(tensor.shape)
            # The exception unwinds the frames, and with them goes what filled the memory: count it here.
            self.live_at_failure = self.live()
            self.keys_at_failure = {key: value.num_bytes for key, value in self._live.items() if value.is_alive}
            raise torch.OutOfMemoryError(
                f"Out of memory. Tried to allocate {format_bytes(num_bytes)}. The limit is "
                f"{format_bytes(self.limit_bytes)} of which {format_bytes(self.limit_bytes - self.live_bytes)} is free."
            )
        birth = self._describe(func, num_bytes)
        birth.shape = tuple(tensor.shape)
        self._note(tensor, "", self.step, birth)
        if len(self.births) < self.max_births:
            self.births.append(birth)

    def _describe(self, func: Any, num_bytes: int) -> Birth:
        module = self.module_stack[-1] if self.module_stack else ""
        phase = self.phase
        if torch._C._current_graph_task_id() != -1:
            phase = "backward"
        elif self.module_stack and phase not in ("optimizer", "load", "save"):
            phase = "forward" if self.grad_at_entry[-1] else "evaluation"
        line = user_line(3) if self._keep_lines else ""
        return Birth(self.step, phase, str(func.name()).replace("::", "."), module, line, num_bytes)

    def _note(self, tensor: Tensor, op: str, step: int, birth: Birth | None = None) -> None:
        try:
            storage = tensor.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes()
        except (NotImplementedError, RuntimeError):
            return  # A wrapper subclass without storage of its own; its inner tensors are seen by themselves.
        if key in self._live:
            return
        if birth is None:
            birth = Birth(step, "before", op, "", "", num_bytes)
        birth.ref = weakref.ref(storage, lambda _, key=key, size=num_bytes: self._died(key, size))  # type: ignore[misc]
        self._live[key] = birth
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _died(self, key: int, num_bytes: int) -> None:
        if self._live.pop(key, None) is not None:
            self.live_bytes -= num_bytes
            self.mutations.pop(key, None)


class _Push:
    def __init__(self, stack: list[str], name: str, grad_at_entry: list[bool]) -> None:
        self.stack, self.name, self.grad_at_entry = stack, name, grad_at_entry

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not self.stack:
            self.grad_at_entry[-1] = torch.is_grad_enabled()
        self.stack.append(self.name)


class _Pop:
    def __init__(self, stack: list[str]) -> None:
        self.stack = stack

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack:
            self.stack.pop()


def _key(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
