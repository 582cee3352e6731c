"""What one operator computes and moves: floating-point operations by formula, bytes by its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .tape import Work

# Operators that only look at their argument in another way; plain ones; products; look-ups of rows; fused attention.
_VIEW, _PLAIN, _MATMUL, _LOOKUP, _ATTENTION = 0, 1, 2, 3, 4

# ``(operator, shape, dtype, flops, bytes, access)``, as in Work.
Facts = tuple[str, tuple[int, ...], str, int, int, str]

_CLASSES: dict[Any, tuple[int, str]] = {}

_MATMULS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_grouped_mm": 0}
# Reads one row for each index, not the whole table.
_LOOKUPS = ("aten::embedding", "aten::index_select", "aten::index", "aten::gather")
# Make memory without writing it.
_UNWRITTEN = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
# Views whose schema does not say that they are.
_HIDDEN_VIEWS = ("aten::_unsafe_view",)
# A product with a packed weight: activations, packed weight, (out, in).
_PACKED_PRODUCT = "bitsandbytes::gemm_4bit"
# The CPU's fused attention: position of the query among the arguments, of the switch for causal, and its products in
# those of a forward pass (backward computes the scores again).
_ATTENTIONS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 4, 1.0),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, 7, 2.5),
}


def _classify(func: Any) -> tuple[int, str]:
    schema = func._schema
    name = str(schema.name)
    short = name.replace("::", ".")
    if name in _UNWRITTEN or name in _HIDDEN_VIEWS:
        return _VIEW, short
    if name in _MATMULS:
        return _MATMUL, short
    if name in _LOOKUPS:
        return _LOOKUP, short
    if name in _ATTENTIONS:
        return _ATTENTION, short
    returns = schema.returns
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    is_view = bool(returns) and not writes and all(value.alias_info is not None for value in returns)
    return (_VIEW if is_view else _PLAIN), short


def describe_work(func: Any, args: Any, result: Any) -> Facts | None:
    """Return the first six fields of a Work: what an operator does; None where it moves nothing.

    Args:
        func: The operator.
        args: Its positional arguments.
        result: What it returned.

    Source:
        Matrix products count ``2 * rows * inner * columns`` as torch.utils.flop_counter does.
    """
    found = _CLASSES.get(func)
    if found is None:
        found = _CLASSES[func] = _classify(func)
    kind, name = found
    if kind == _VIEW:
        return None
    if kind == _MATMUL:
        return _describe_product(func, name, args, result)
    num_bytes = _bytes_of(result)
    if kind == _LOOKUP:
        return name, (), _dtype_of(args), 0, 2 * num_bytes, ""
    num_bytes += _bytes_of(args)
    if kind == _ATTENTION:
        return _describe_attention(func, name, args, num_bytes)
    if func._schema.name == _PACKED_PRODUCT:
        rows, (columns, inner) = args[0].numel() // args[0].shape[-1], args[2]
        return name, (rows, inner, columns), _dtype_of(args), 2 * rows * inner * columns, num_bytes, ""
    first = args[0] if args else None
    is_strided = isinstance(first, torch.Tensor) and not first.is_contiguous()
    return name, (), _dtype_of(args), 0, num_bytes, "strided" if is_strided else ""


def _describe_product(func: Any, name: str, args: Any, result: Any) -> Facts:
    left, right = args[_MATMULS[func._schema.name] :][:2]
    rows = left.numel() // left.shape[-1]
    shape = (rows, left.shape[-1], right.shape[-1])
    num_bytes = _bytes_of(result) + _bytes_of((left, right))
    access = _layout(left) + _layout(right)
    return name, shape, str(left.dtype)[6:], 2 * shape[0] * shape[1] * shape[2], num_bytes, access


def _describe_attention(func: Any, name: str, args: Any, num_bytes: int) -> Facts:
    position, causal, factor = _ATTENTIONS[func._schema.name]
    query, key, value = args[position : position + 3]
    batch, heads, length, size = query.shape
    flops = factor * 2 * batch * heads * length * key.shape[2] * (size + value.shape[-1])
    if len(args) > causal and args[causal]:
        flops /= 2
    return name, (length, key.shape[2], size), str(query.dtype)[6:], round(flops), num_bytes, ""


def _layout(matrix: torch.Tensor) -> str:
    """Return ``"t"`` where a matrix lies transposed in memory, else ``"n"``."""
    return "t" if matrix.stride(-1) != 1 and matrix.stride(-2) == 1 else "n"


def _dtype_of(args: Any) -> str:
    for value in args:
        if isinstance(value, torch.Tensor):
            return str(value.dtype)[6:]
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return str(value[0].dtype)[6:]
    return ""


def split_work(func: Any, args: Any, result: Any, owner: Callable[[Any], int | None], phase: int) -> list[Work]:
    """Return what an operator does outside the model's code, by the layer that its tensors belong to.

    Optimizers run one operator over the tensors of all layers; only what belongs to a layer repeats with it.

    Args:
        func: The operator.
        args: Its positional arguments.
        result: What it returned.
        owner: Gives the layer of a tensor; None for one that is not on the device.
        phase: Index of the phase.
    """
    found = _CLASSES.get(func)
    if found is None:
        found = _CLASSES[func] = _classify(func)
    kind, name = found
    if kind == _VIEW:
        return []
    moved: dict[int, int] = {}
    _add_bytes(args, owner, moved)
    if not moved:  # Made from nothing on the device, such as a step count of 0.
        return []
    _add_bytes((result,), owner, moved)
    dtype = _dtype_of(args)
    return [Work(name, (), dtype, 0, num_bytes, layer, phase) for layer, num_bytes in moved.items()]


def _add_bytes(values: Any, owner: Callable[[Any], int | None], moved: dict[int, int]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            layer = owner(value)
            if layer is not None:
                moved[layer] = moved.get(layer, 0) + value.numel() * value.itemsize
        elif isinstance(value, (tuple, list)):
            _add_bytes(value, owner, moved)


def _bytes_of(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return values.numel() * values.itemsize
    if isinstance(values, (tuple, list)):
        return sum(_bytes_of(value) for value in values if isinstance(value, (torch.Tensor, tuple, list)))
    return 0
