"""Results of common operators on meta tensors by rule, without torch's meta functions.

Many of torch's meta functions are written in Python and take 0.1 to 1.5 ms a call, which a new batch shape pays for
every operator. What is answered here covers the tensors of language models; everything else returns None and goes to
torch. A test holds each rule equal to torch's own answer, strides included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# ``(shape, strides, dtype)`` of a result, which lies densely in a storage of its own.
Described = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
Rule = Callable[[Any], Any]

_POINTWISE = {
    "mul": "Tensor Scalar",
    "add": "Tensor Scalar",
    "sub": "Tensor Scalar",
    "div": "Tensor Scalar",
    "pow": "Tensor_Scalar",
    "neg": "default",
    "rsqrt": "default",
    "silu": "default",
    "silu_backward": "default",
    "tanh": "default",
    "sigmoid": "default",
    "cos": "default",
    "sin": "default",
    "gelu": "default",
    "gelu_backward": "default",
}


def known_result(func: Any, args: Any, kwargs: Any) -> Any:
    """Return ``(shape, strides, dtype)`` of an operator's result, a list for several, or None: ask torch.

    Args:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments; operators that are given any are left to torch.
    """
    found = _RULES.get(id(func))
    return None if found is None or kwargs else found[1](args)


def _contiguous(shape: Any, dtype: torch.dtype) -> Described:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(shape), tuple(reversed(strides)), dtype


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta and value.dtype.is_floating_point and value.is_contiguous()


def _packed_strides(value: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a dense tensor whose dimensions lie in the order of ``value``'s; None where it has none.

    Source:
        ``compute_elementwise_output_logical_to_physical_perm``, torch/_prims_common: dimensions are ordered by the
        strides of the first tensor that tells them apart.
    """
    strides = value.stride()
    if 0 in strides or len(set(strides)) < len(strides) or min(value.shape) < 2:
        return None
    packed, step = [0] * len(strides), 1
    for index in sorted(range(len(strides)), key=strides.__getitem__):
        packed[index] = step
        step *= value.shape[index]
    return tuple(packed)


def _pointwise(args: Any) -> Described | None:
    """Floating-point tensors that broadcast to the shape of the first, or contiguous ones to any shape."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    if len(tensors) > 2 or any(isinstance(value, complex) for value in args):
        return None
    first = tensors[0]
    if first.ndim == 0 or not all(item.is_meta and item.dtype.is_floating_point for item in tensors):
        return None
    if len(tensors) == 1:
        shape, dtype = first.shape, first.dtype
        all_plain = first.is_contiguous()
    else:
        second = tensors[1]
        shape = first.shape if second.ndim == 0 else torch.broadcast_shapes(first.shape, second.shape)
        dtype = torch.result_type(first, second)
        all_plain = first.is_contiguous() and second.is_contiguous()
    if all_plain:
        return _contiguous(shape, dtype)
    strides = _packed_strides(first) if shape == first.shape else None
    return None if strides is None else (tuple(shape), strides, dtype)


def _compare(args: Any) -> Described | None:
    first, second = args
    if not (first.is_meta and first.ndim and first.is_contiguous()):
        return None
    if not isinstance(second, Tensor):
        return _contiguous(first.shape, torch.bool)
    if not (second.is_meta and second.is_contiguous()):
        return None
    return _contiguous(torch.broadcast_shapes(first.shape, second.shape), torch.bool)


def _mm(args: Any) -> Described | None:
    left, right = args
    return _contiguous((left.shape[0], right.shape[1]), left.dtype) if left.is_meta and right.is_meta else None


def _bmm(args: Any) -> Described | None:
    left, right = args
    if not (left.is_meta and right.is_meta):
        return None
    return _contiguous((left.shape[0], left.shape[1], right.shape[2]), left.dtype)


def _softmax(args: Any) -> Described | None:
    source, _, to_float = args
    return _contiguous(source.shape, torch.float32 if to_float else source.dtype) if _is_plain(source) else None


def _safe_softmax(args: Any) -> Described | None:
    return _contiguous(args[0].shape, args[0].dtype) if len(args) == 2 and _is_plain(args[0]) else None


def _softmax_backward(args: Any) -> Described | None:
    grad, output, _, dtype = args
    return _contiguous(grad.shape, dtype) if _is_plain(grad) and _is_plain(output) else None


def _nll_loss_forward(args: Any) -> list[Described] | None:
    source, target, _, reduction, _ = args
    if not _is_plain(source) or source.ndim != 2 or not target.is_meta:
        return None
    shape = (source.shape[0],) if reduction == 0 else ()
    return [_contiguous(shape, source.dtype), _contiguous((), source.dtype)]


def _nll_loss_backward(args: Any) -> Described | None:
    return _contiguous(args[1].shape, args[1].dtype) if args[0].is_meta and _is_plain(args[1]) else None


def _cat(args: Any) -> Described | None:
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    first = tensors[0]
    for item in tensors:
        if not item.is_meta or item.dtype != first.dtype or item.ndim != first.ndim or not item.numel():
            return None
        if item.ndim == 5 or (item.ndim == 4 and not item.is_contiguous() and item.stride(1) <= item.stride(3)):
            return None  # It may be in channels-last order, which the result would keep.
    if first.ndim == 0:
        return None
    shape = list(first.shape)
    shape[dim] = sum(item.shape[dim] for item in tensors)
    return _contiguous(shape, first.dtype)


def _same(args: Any) -> Described | None:
    source = args[0]
    if not (source.is_meta and source.is_contiguous()):
        return None
    return _contiguous(source.shape, source.dtype)


def _cumsum(args: Any) -> Described | None:
    return _same(args) if args[0].dtype.is_floating_point or args[0].dtype == torch.int64 else None


def _reduce(args: Any) -> Described | None:
    source, dims = args[0], args[1] if len(args) > 1 else None
    if not _is_plain(source) or not dims or source.ndim == 0:
        return None
    keeps = len(args) > 2 and args[2]
    gone = {dim % source.ndim for dim in dims}
    shape = [1 if index in gone else size for index, size in enumerate(source.shape) if keeps or index not in gone]
    return _contiguous(shape, source.dtype)


def _slice_backward(args: Any) -> Described | None:
    return _contiguous(args[1], args[0].dtype) if args[0].is_meta and math.prod(args[1]) else None


def _rules() -> dict[int, tuple[Any, Rule]]:
    aten = torch.ops.aten
    rules: list[tuple[Any, Rule]] = [
        (getattr(getattr(aten, name), overload), _pointwise)
        for name, overloads in _POINTWISE.items()
        for overload in overloads.split()
    ]
    rules += [
        (getattr(getattr(aten, name), overload), _compare)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for overload in ("Tensor", "Scalar")
    ]
    rules += [
        (aten.mm.default, _mm),
        (aten.bmm.default, _bmm),
        (aten._softmax.default, _softmax),
        (aten._log_softmax.default, _softmax),
        (aten._safe_softmax.default, _safe_softmax),
        (aten._softmax_backward_data.default, _softmax_backward),
        (aten._log_softmax_backward_data.default, _softmax_backward),
        (aten.nll_loss_forward.default, _nll_loss_forward),
        (aten.nll_loss_backward.default, _nll_loss_backward),
        (aten.cat.default, _cat),
        (aten.cumsum.default, _cumsum),
        (aten.tril.default, _same),
        (aten.triu.default, _same),
        (aten.mean.dim, _reduce),
        (aten.sum.dim_IntList, _reduce),
        (aten.slice_backward.default, _slice_backward),
    ]
    return {id(func): (func, rule) for func, rule in rules}


# By id, since an operator's own hash is computed in Python; the entry holds the operator, so that its id stays its own.
_RULES = _rules()
