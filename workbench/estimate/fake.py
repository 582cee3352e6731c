"""Run operators on meta tensors, fast: shapes of results are remembered, in-place operators are skipped.

A meta tensor has a shape, a dtype and a storage size, and no memory. Where torch's meta kernels are written in Python
they cost 0.3 ms an operator; equal layers ask the same question again and again, so the answer is kept for the life of
the process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import data_shapes, quantized
from .answers import known_result
from .modules import ModuleMap, kept_map
from .quantized import Card
from .recorder import _MANY, _SILENT, _SINGLE, StorageRecorder, _Birth
from .work import Facts, describe_work

# Answers kept: (shape, strides, dtype) of each result. About 300 bytes each.
MAX_REMEMBERED = 100_000

_REMEMBERED: dict[Any, Any] = {}

# In-place operators that change shape or storage and not only values.
_RESHAPING = frozenset(
    {
        "resize_",
        "resize_as_",
        "set_",
        "t_",
        "transpose_",
        "unsqueeze_",
        "squeeze_",
        "swapdims_",
        "as_strided_",
        "detach_",
    }
)

# ``{id(operator): (operator, whether it can be skipped)}``, see ``recorder._KINDS``.
_SKIPPED: dict[int, tuple[Any, bool]] = {}
_UNKNOWN = object()
_META = torch.device("meta")
_READ_VALUE = torch.ops.aten._local_scalar_dense.default
_SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data.default


class MetaRecorder(StorageRecorder):
    """A StorageRecorder that also computes: results are new meta tensors of remembered shapes.

    Args:
        model: A model on the meta device.
        card: A CUDA target, for the scratch memory of its kernels.
        num_true: Elements that a search for true ones (``nonzero``) finds at most; None finds all.
        answer: What a question about values (``bool(tensor)``, ``.all()``) is answered with; there are no values.
        with_work: Also record what operators do.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        answer: bool,
        num_true: int | None = None,
        card: Card | None = None,
        with_work: bool = True,
    ) -> None:
        super().__init__(model, "meta", with_work=with_work)
        self._num_true = num_true
        self._share_true: float | None = None
        self._facts: Any = _UNKNOWN
        self._answer = answer
        self._card = card or Card()

    def _map_of(self, model: nn.Module) -> ModuleMap:
        return kept_map(model)

    def close(self) -> None:
        """Stop watching; the model keeps its hooks for the next trace."""
        if self.map is not None:
            self.map.watcher = None
        self._live.clear()

    def copy_token(self, token: int, module: int, layer: int) -> int:
        """Record a birth like that of ``token`` in another module and layer; returns the new token."""
        before, self._module = self._module, module
        copy = self._note(self.tape.sizes[token], self.tape.operators[token], layer)
        self._module = before
        return copy

    def adopt(self, tensor: torch.Tensor, token: int) -> None:
        """Let a token that was copied end when ``tensor`` does, which no operator of this trace made."""
        storage = tensor.untyped_storage()
        birth = _Birth(storage, self._on_death)
        birth.token, birth.key = token, storage._cdata
        self._live[birth.key] = birth

    @contextlib.contextmanager
    def finding(self, share: float) -> Iterator[None]:
        """Let searches for true elements find this share of what they look at, while inside."""
        self._share_true = share
        try:
            yield
        finally:
            self._share_true = None

    def _execute(self, func: Any, args: Any, kwargs: Any, kind: int) -> Any:
        self._facts = _UNKNOWN
        if kind == _SILENT:
            return self._run_silent(func, args, kwargs)
        if kind not in (_SINGLE, _MANY):
            return func(*args, **kwargs)
        if func.namespace == "bitsandbytes":
            return self._run_bitsandbytes(func, args, kwargs)
        try:
            # By id: an operator's own hash is computed in Python. The recorder keeps every operator it has seen.
            key = (id(func), signature_of(args), signature_of(tuple(kwargs.items())) if kwargs else None)
            found = _REMEMBERED.get(key)
        except TypeError:  # An argument that cannot be a key.
            return func(*args, **kwargs)
        if found is not None:
            described, self._facts = found
            result = make_result(described)
        else:
            result = self._run_new(func, args, kwargs, key)
        if func is _SOFTMAX_BACKWARD:
            self._add_softmax_product(func, args, result)
        return result

    def _run_new(self, func: Any, args: Any, kwargs: Any, key: Any) -> Any:
        if func is _READ_VALUE and args[0].is_meta:
            return self._value_of(args[0])
        if func in data_shapes.OPERATORS:
            # Not remembered: a mask's share of the table it is a row of is not part of the key.
            share, num_true = self._share_true, self._num_true
            if share is not None and isinstance(args[0], torch.Tensor):
                num_true = max(1, math.ceil(args[0].numel() * share))
            result = data_shapes.result_of(func, args, kwargs, num_true)
            if result is not None:
                return result
        described = known_result(func, args, kwargs)
        if described is not None:
            result = make_result(described)
        else:
            result = _run_mixed(func, args, kwargs)
            described = describe_result(result)
        if described is not None:
            if len(_REMEMBERED) > MAX_REMEMBERED:
                _REMEMBERED.clear()
            self._facts = describe_work(func, args, result)
            _REMEMBERED[key] = (described, self._facts)
        return result

    def _describe(self, func: Any, args: Any, result: Any) -> Facts | None:
        return describe_work(func, args, result) if self._facts is _UNKNOWN else self._facts

    def _add_softmax_product(self, func: Any, args: Any, result: torch.Tensor) -> None:
        """On CUDA, softmax's backward multiplies gradient and output into a temporary beside its result.

        Source:
            ``softmax_backward_cuda_out``, aten/src/ATen/native/cuda/SoftMax.cu.
        """
        if self._card.capability is not None:
            self._bear_tensor(result, func, self._layer)
            self.add_transients([args[0].numel() * args[0].itemsize], func)

    def _run_bitsandbytes(self, func: Any, args: Any, kwargs: Any) -> Any:
        sizes = quantized.transient_bytes(func, args, kwargs, self._card)
        with self.transients(sizes, func):
            found = quantized.stand_in(func, args)
            result = func(*args, **kwargs) if found is None else found
            if sizes:  # Its result is made while they are there.
                for item in result if isinstance(result, tuple) else (result,):
                    if isinstance(item, torch.Tensor):
                        self._bear_tensor(item, func, self._layer)
        return result

    def _run_silent(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = _SKIPPED.get(id(func))
        if found is None:
            schema = func._schema
            name = schema.name.split("::")[-1]
            first = schema.arguments[0].alias_info if schema.arguments else None
            skip = first is not None and first.is_write and name not in _RESHAPING and len(schema.returns) <= 1
            found = _SKIPPED[id(func)] = (func, skip)
        if found[1] and _is_meta(args[0]):
            return args[0] if func._schema.returns else None
        if func is _READ_VALUE and args[0].is_meta:
            return self._value_of(args[0])
        return func(*args, **kwargs)

    def _value_of(self, tensor: torch.Tensor) -> Any:
        if tensor.dtype == torch.bool:
            return self._answer
        return 1.0 if tensor.dtype.is_floating_point else 1


def _run_mixed(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator; numbers that the model's Python read from the CPU count as lying on the device."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "expected device" not in str(error):
            raise
        moved = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in args]
        return func(*moved, **kwargs)


def _is_meta(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and _is_meta(value[0])
    return isinstance(value, torch.Tensor) and value.is_meta


def signature_of(values: Any) -> Any:
    """Return a hashable description of arguments: equal ones give results of equal shape."""
    items: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            items.append((value.shape, value.stride(), value.dtype, value.is_meta))
        elif isinstance(value, (list, tuple)):
            items.append(signature_of(value))
        else:
            items.append((value.__class__, value))  # 1, 1.0 and True are equal, and promote differently.
    return tuple(items)


def describe_result(result: Any) -> Any:
    """Return ``(shape, strides, dtype)`` of a meta result, a list for several; None where not all of it is meta."""
    if isinstance(result, torch.Tensor):
        if not result.is_meta or result.untyped_storage().nbytes() != _dense_bytes(result):
            return None
        return (tuple(result.shape), result.stride(), result.dtype)
    if isinstance(result, (tuple, list)):
        parts = [describe_result(item) for item in result]
        storages = {item.untyped_storage()._cdata for item in result if isinstance(item, torch.Tensor)}
        return parts if parts and None not in parts and len(storages) == len(parts) else None
    return None


def _dense_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def make_result(described: Any) -> Any:
    """Return meta tensors as ``describe_result`` told them."""
    if isinstance(described, list):
        return [make_result(item) for item in described]
    shape, strides, dtype = described
    return torch.empty_strided(shape, strides, dtype=dtype, device=_META)
