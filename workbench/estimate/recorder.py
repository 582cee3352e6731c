"""StorageRecorder: births and deaths of storages, meta or real, with phase, module and operator.

Costs are what count here: a trace of two training steps runs thousands of operators. Each operator pays one dictionary
look-up for its kind, views and in-place operators pay nothing more, and no Python stack is walked.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..events import Cancel
from .modules import ModuleMap
from .tape import NO_LAYER, Tape, Work
from .work import Facts, describe_work, split_work

# Kinds of operators.
_SILENT, _SINGLE, _MANY, _ALIAS = 0, 1, 2, 3

# ``{id(operator): (operator, kind)}``: an operator's own hash is computed in Python, at every look-up. The entry holds
# the operator, so that its id stays its own.
_KINDS: dict[int, tuple[Any, int]] = {}

# Operators whose result may share its argument's storage though their schema does not say so.
_ALIASING = frozenset(
    f"aten::{name}" for name in ("lift_fresh", "lift_fresh_copy", "lift", "set_", "resize_", "_unsafe_view", "reshape")
)

# AccumulateGrad nodes have this sequence number; they run as soon as their gradient exists.
_NO_SEQUENCE = 2**64 - 1


# Operator of a copy between the device and host memory.
HOST_COPY = "host_copy"

# Added to the name of an operator for memory that its kernel takes and gives back before it returns.
SCRATCH = " (scratch)"


def _sequence_number() -> int:
    """Return the number that the next autograd node of this thread gets."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # imported there, not listed
    return number


class _Birth(weakref.ref):  # type: ignore[type-arg]  # subclass only adds a slot
    """A weak reference to a storage that knows its token."""

    __slots__ = ("key", "token")
    key: int
    token: int


def operator_kind(func: Any) -> int:
    """Return whether an operator makes no storage, one, several, or hands on its argument's (which may be new)."""
    found = _KINDS.get(id(func))
    if found is not None:
        return found[1]
    returns = func._schema.returns
    name = func._schema.name
    if name in _ALIASING:
        kind = _ALIAS
    elif not returns or all(value.alias_info is not None for value in returns):
        kind = _SILENT
    elif len(returns) == 1 and str(returns[0].type) == "Tensor":
        kind = _SINGLE
    else:
        kind = _MANY
    _KINDS[id(func)] = (func, kind)
    return kind


class StorageRecorder(TorchDispatchMode):
    """Records every storage that operators make while it is entered.

    Args:
        model: Its module paths label the events; None labels nothing.
        device_type: Record only storages on this device: ``"meta"`` for a trace, ``"cpu"`` or ``"cuda"`` for a run.
        with_work: Also record what operators do, for the time estimate.

    Example:
        >>> with StorageRecorder(model, "cpu") as recorder:
        ...     recorder.begin_segment("first", "forward")
        ...     loss = model(**batch).loss
        >>> max_bytes = recorder.tape.sizes
    """

    def __init__(self, model: nn.Module | None = None, device_type: str = "cpu", *, with_work: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.tape = Tape()
        self._device_type = device_type
        self._with_work = with_work
        self._live: dict[int, _Birth] = {}
        self._operator_ids: dict[Any, int] = {}
        self._phase = 0
        self._module = 0
        self._layer = NO_LAYER
        self._in_backward = self._by_owner = False
        self._stack: list[int] = []
        self._unowned: list[int] = []
        self._switches: tuple[list[int], list[int]] = ([], [])
        self._in_accumulation = False
        self.copied_gradients: set[int] = set()
        self.on_birth: Callable[[int], None] | None = None
        self.on_death: Callable[[int], None] | None = None
        # Looked at in every operator, so that a newer change never waits for the rest of a stale trace.
        self.cancel: Cancel | None = None
        self.map = None if model is None else self._map_of(model)
        if self.map is not None:
            self.tape.module_names, self.tape.module_layers = self.map.names, self.map.layers
            self.map.watch(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping ``__torch_dispatch__`` in a guard against its compiler, 10 µs an operator."""
        return False

    def _map_of(self, model: nn.Module) -> ModuleMap:
        return ModuleMap(model)

    # -- where we are ------------------------------------------------------------------------------------------

    def begin_segment(self, name: str, phase: str) -> None:
        """Begin a named stretch of the tape."""
        self.tape.marks.append((len(self.tape.events), name))
        self.tape.work_marks.append((len(self.tape.work), name))
        self.begin_phase(phase)

    def begin_phase(self, phase: str) -> None:
        """Say what the run is doing from here on: ``"forward"``, ``"backward"``, ``"optimizer"`` ..."""
        names = self.tape.phase_names
        if phase not in names:
            names.append(phase)
        self._set_phase(names.index(phase))
        self._in_backward = phase == "backward"
        # Outside the model's code a storage belongs to the layer of the parameter it is made from.
        self._by_owner = phase not in ("forward", "backward", "evaluation")
        self._module, self._layer = 0, NO_LAYER
        self._stack.clear()
        self._unowned.clear()
        if phase in ("forward", "evaluation"):
            self._switches = ([_sequence_number()], [0])

    def enter_recompute(self, module: int) -> tuple[int, int, int, list[int]]:
        """Begin recomputing the forward pass of ``module`` inside backward; returns what ``leave_recompute`` takes."""
        state = (self._phase, self._module, self._layer, self._stack)
        self._in_backward = False
        names = self.tape.phase_names
        if "recompute" not in names:
            names.append("recompute")
        self._set_phase(names.index("recompute"))
        self._stack = []
        self._enter(module)
        return state

    def leave_recompute(self, state: tuple[int, int, int, list[int]]) -> None:
        """Go back to what ``enter_recompute`` left; also when the recomputation stopped early by an exception."""
        # The layer stays: backward of the layer that was computed again goes on, and what dies here is its own.
        phase, self._module, _, self._stack = state
        self._set_phase(phase)
        self._in_backward = True

    def _set_phase(self, phase: int) -> None:
        self._phase = phase
        self.tape.phase_marks.append((len(self.tape.events), phase))

    @property
    def current_module(self) -> int:
        """Index into ``tape.module_names`` of the module whose forward runs."""
        return self._module

    def enter_module(self, index: int) -> None:
        """A module's forward begins."""
        self._stack.append(self._module)
        self._enter(index)

    def leave_module(self) -> None:
        """It ends."""
        if self._stack:
            self._module = self._stack.pop()
            self._mark_switch()

    def _enter(self, index: int) -> None:
        self._module = index
        # The layer stays until a module outside it begins: between two layers the loop drops what the last one left.
        self._layer = self.tape.module_layers[index]
        self._mark_switch()

    def _mark_switch(self) -> None:
        numbers, modules = self._switches
        numbers.append(_sequence_number())
        modules.append(self._module)

    def _locate(self) -> None:
        """In backward: find the module whose forward made the node that runs."""
        node = torch._C._current_autograd_node()
        if node is None:
            return
        number = node._sequence_nr()
        self._in_accumulation = number >= _NO_SEQUENCE
        if self._in_accumulation:
            variable = getattr(node, "variable", None)
            if variable is not None and self.map is not None:
                self._module = self.map.parameter_modules.get(id(variable), self._module)
            return
        numbers, modules = self._switches
        index = bisect.bisect_right(numbers, number) - 1
        if index >= 0:
            self._module = modules[index]
            self._layer = self.tape.module_layers[self._module]

    # -- what happens ------------------------------------------------------------------------------------------

    def _module_of(self, path: str) -> int:
        return 0 if self.map is None else self.map.index_of.get(path, 0)

    def add_tensor(self, tensor: torch.Tensor, operator: str, module: str = "") -> None:
        """Record a tensor that no operator made under this mode: a parameter, a buffer, an input."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            if storage._cdata in self._live or not storage.nbytes():
                return
            before = self._module
            self._module = self._module_of(module)
            self._bear(storage, self._operator_id(operator), storage.nbytes(), self.tape.module_layers[self._module])
            self._module = before

    def note_tensor(self, tensor: torch.Tensor, operator: str) -> None:
        """Record a tensor that was made here by something that no operator shows."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live and storage.nbytes():
                self._bear(storage, self._operator_id(operator), storage.nbytes(), self._layer)

    def add_bytes(self, num_bytes: int, operator: str, module: str = "") -> int:
        """Record memory that no tensor of the trace stands for; returns a token for ``end_bytes``."""
        index = self._module_of(module)
        before, self._module = self._module, index
        token = self._note(num_bytes, self._operator_id(operator), self.tape.module_layers[index])
        self._module = before
        return token

    def end_bytes(self, token: int) -> None:
        """End what ``add_bytes`` began."""
        self._die(token)

    def add_attention(self, flops: int, num_bytes: int, dtype: str, is_backward: bool) -> None:
        """Record what a fused attention kernel does; backward computes the scores again: 2.5 times the products."""
        factor = 2.5 if is_backward else 1.0
        name = "attention_backward" if is_backward else "attention"
        work = Work(name, (), dtype, round(factor * flops), round(2 * factor * num_bytes), self._layer, self._phase)
        self.tape.work.append(work)

    def move_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Record that a tensor goes to host memory; what is returned brings it back as a new storage.

        Source:
            ``components.activations.host_mover`` calls it in place of the copy.
        """
        shape, dtype = tensor.shape, tensor.dtype
        num_bytes = tensor.numel() * tensor.element_size()
        self._add_move(num_bytes)

        def bring_back() -> torch.Tensor:
            self._add_move(num_bytes)
            return torch.empty(shape, dtype=dtype, device=self._device_type)

        return bring_back

    def _add_move(self, num_bytes: int) -> None:
        self.tape.work.append(Work(HOST_COPY, (), "", 0, num_bytes, self._layer, self._phase))

    def add_update(self, operator: str, tensors: list[torch.Tensor]) -> None:
        """Record an update in place that no operator of the trace shows, for the time estimate."""
        with torch._C.DisableTorchFunction():
            num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
            dtype = str(tensors[0].dtype)[6:]
            layer = self._layer_of(tensors[0])
        self.tape.work.append(Work(operator, (), dtype, 0, num_bytes, layer, self._phase))

    def add_transients(self, sizes: list[int], func: Any) -> None:
        """Record memory that an operator's kernel takes, piece by piece, and gives back before it returns."""
        with self.transients(sizes, func):
            pass

    @contextlib.contextmanager
    def transients(self, sizes: list[int], func: Any) -> Iterator[None]:
        """Record memory that an operator's kernel takes, piece by piece, before what happens in the context."""
        operator = self._operator_id(f"{str(func._schema.name).replace('::', '.')}{SCRATCH}") if sizes else 0
        tokens = [self._note(num_bytes, operator, self._layer) for num_bytes in sizes if num_bytes]
        yield
        for token in tokens:
            self._die(token)

    def token_of(self, tensor: torch.Tensor) -> int | None:
        """Return the token of a tensor's storage, or None where it was never recorded."""
        with torch._C.DisableTorchFunction():
            birth = self._live.get(tensor.untyped_storage()._cdata)
        return None if birth is None else birth.token

    def close(self) -> None:
        """Take the hooks off the model and stop watching storages."""
        if self.map is not None:
            self.map.remove_hooks()
        self._live.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.cancel is not None:
            self.cancel.check()
        found = _KINDS.get(id(func))
        kind = operator_kind(func) if found is None else found[1]
        # Function modes stay active in operators that autograd calls; here they would only cost time.
        with torch._C.DisableTorchFunction():
            if self._in_backward and kind != _SILENT:
                self._locate()
            result = self._execute(func, args, kwargs or {}, kind)
            if kind == _SINGLE:
                if result.device.type == self._device_type:
                    if self._by_owner:
                        self._bear_owned(result, func, args)
                    else:
                        self._bear_tensor(result, func, self._layer)
            elif kind != _SILENT:
                self._bear_many(result, func, args)
            if self._with_work:
                if self._by_owner:
                    self.tape.work.extend(split_work(func, args, result, self._owner, self._phase))
                else:
                    facts = self._describe(func, args, result)
                    if facts is not None:
                        self.tape.work.append(Work._make((*facts[:5], self._layer, self._phase, facts[5])))
        return result

    def _describe(self, func: Any, args: Any, result: Any) -> Facts | None:
        return describe_work(func, args, result)

    def _execute(self, func: Any, args: Any, kwargs: Any, kind: int) -> Any:
        return func(*args, **kwargs)

    def _owner(self, source: Any) -> int | None:
        """Return the layer of the storage behind ``source``, or None where that is no recorded tensor."""
        if isinstance(source, torch.Tensor):
            birth = self._live.get(source.untyped_storage()._cdata)
            if birth is not None:
                return self.tape.layers[birth.token]
        return None

    def _layer_of(self, source: Any) -> int:
        layer = self._owner(source)
        return NO_LAYER if layer is None else layer

    def _bear_owned(self, tensor: torch.Tensor, func: Any, args: Any) -> None:
        """Record a storage for the layer of what it is made from.

        One that is made from nothing (the step count of AdamW) belongs to the parameter whose state is being made: the
        next one that is named.
        """
        if args and isinstance(args[0], (list, tuple)) and args[0] and isinstance(args[0][0], torch.Tensor):
            self._layer = NO_LAYER
            self._bear_gathered(tensor, func, args[0])
            return
        layer = self._owner(args[0]) if args else None
        first = len(self.tape.events)
        self._bear_tensor(tensor, func, NO_LAYER if layer is None else layer)
        if layer is None:
            self._unowned.extend(range(first, len(self.tape.events)))
            return
        # A loop over parameters drops what the last one left while it works on the next.
        self._layer = layer
        for index in self._unowned:
            self.tape.event_layers[index] = self.tape.layers[self.tape.events[index]] = layer
        self._unowned.clear()

    def _bear_gathered(self, tensor: torch.Tensor, func: Any, sources: Any) -> None:
        """Record a storage made from tensors of many layers (the stacked norms); it grows with the layers."""
        first = len(self.tape.sizes)
        self._bear_tensor(tensor, func, NO_LAYER)
        items = [item for item in sources if isinstance(item, torch.Tensor)]
        total = sum(item.numel() for item in items)
        if len(self.tape.sizes) == first or not total:
            return
        shares: dict[int, int] = {}
        for item in items:
            layer = self._layer_of(item)
            if layer != NO_LAYER:
                shares[layer] = shares.get(layer, 0) + self.tape.sizes[first] * item.numel() // total
        self.tape.growth[first] = shares

    def _bear_many(self, result: Any, func: Any, args: Any) -> None:
        items = result if isinstance(result, (tuple, list)) else (result,)
        sources = args[0] if args and isinstance(args[0], (tuple, list)) else ()
        is_paired = self._by_owner and len(sources) == len(items)
        if self._by_owner:
            self._layer = self._layer_of(args[0]) if args else NO_LAYER
        for index, item in enumerate(items):
            if isinstance(item, torch.Tensor):
                if item.device.type == self._device_type:
                    layer = self._layer_of(sources[index]) if is_paired else self._layer
                    self._bear_tensor(item, func, layer)
            elif isinstance(item, (tuple, list)):
                self._bear_many(item, func, ())

    def _bear_tensor(self, tensor: torch.Tensor, func: Any, layer: int) -> None:
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is not None and known() is storage:
            return
        num_bytes = storage.nbytes()
        if num_bytes:
            operator = self._operator_ids.get(id(func))
            if operator is None:
                operator = self._operator_id(str(func._schema.name).replace("::", "."))
                self._operator_ids[id(func)] = operator  # _KINDS holds the operator, so the id stays its own.
            self._bear(storage, operator, num_bytes, layer)

    def _bear(self, storage: torch.UntypedStorage, operator: int, num_bytes: int, layer: int) -> int:
        token = self._note(num_bytes, operator, layer)
        if self._in_accumulation and self._in_backward:
            self.copied_gradients.add(token)
        birth = _Birth(storage, self._on_death)
        birth.token, birth.key = token, storage._cdata
        self._live[birth.key] = birth
        return token

    def _note(self, num_bytes: int, operator: int, layer: int) -> int:
        tape = self.tape
        token = len(tape.sizes)
        tape.sizes.append(num_bytes)
        tape.modules.append(self._module)
        tape.operators.append(operator)
        tape.layers.append(layer)
        tape.phases.append(self._phase)
        tape.events.append(token)
        tape.event_layers.append(layer)
        if self.on_birth is not None:
            self.on_birth(token)
        return token

    def _operator_id(self, name: str) -> int:
        names = self.tape.operator_names
        index = self._operator_ids.get(name)
        if index is None:
            index = len(names)
            names.append(name)
            self._operator_ids[name] = index
        return index

    def _on_death(self, birth: _Birth) -> None:
        if self._live.get(birth.key) is birth:
            del self._live[birth.key]
            self._die(birth.token)

    def _die(self, token: int) -> None:
        self.tape.events.append(~token)
        self.tape.event_layers.append(self._layer)
        if self.on_death is not None:
            self.on_death(token)
