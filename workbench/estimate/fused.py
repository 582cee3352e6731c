"""One fused attention kernel on meta tensors: what it makes, what it keeps for backward, and its scratch memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Told ``(flops, bytes, dtype, is_backward)`` of a fused kernel.
Note = Callable[[int, int, str, bool], None]
# Flash backward pads the sequence of its float32 accumulators to this.
# Source: round_multiple(seqlen, 128), aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
FLASH_ROWS = 128

# Shape and dtype of a tensor.
Buffer = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Kernel:
    """A fused kernel on inputs of one shape.

    Attributes:
        note: Told what it computes.
        work: ``(flops, bytes, dtype)`` of forward.
        make_output: Makes its result.
        kept: What backward needs beside inputs and output; the first is the log-sum-exp of each row.
        scratch: What backward takes beside the gradients.
        returns_sums: Whether the log-sum-exp is a result too.
    """

    note: Note
    work: tuple[int, int, str]
    make_output: Callable[[], Tensor]
    kept: tuple[Buffer, ...]
    scratch: tuple[Buffer, ...]
    returns_sums: bool = False


def run_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kernel: Kernel) -> Any:
    """Return the kernel's result, a meta tensor, or result and log-sum-exp."""
    # Recomputation compares what is saved then and now, by devices too, which a trace's function mode would rename.
    with torch._C.DisableTorchFunction():
        return _Fused.apply(query, key, value, mask, kernel)  # type: ignore[no-untyped-call]


def attention_work(
    query: Sequence[int], key: Sequence[int], dtype: torch.dtype, is_causal: bool, *,
    value_size: int | None = None, window: int | None = None,
) -> tuple[int, int, str]:  # fmt: skip
    """Return ``(flops, bytes, dtype)`` of forward: two products over all pairs that are seen.

    Args:
        query: Its shape, (B, heads, S, head size).
        key: The keys' shape.
        dtype: Of both.
        is_causal: Half of the pairs are left out.
        value_size: Head size of the values where it is another.
        window: Keys that a query sees; None for all.
    """
    batch, heads, length, size = query
    seen = key[2] if window is None else min(key[2], window)
    values = value_size or size
    flops = 2 * batch * heads * length * seen * (size + values)
    moved = (2 * math.prod(query) + batch * key[1] * key[2] * (size + values)) * dtype.itemsize
    is_half = is_causal and seen == key[2]
    return (flops // 2 if is_half else flops), moved, str(dtype)[6:]


def flash_scratch(
    rows: int, key_rows: int, heads: tuple[int, int], size: int, dtype: torch.dtype
) -> tuple[Buffer, ...]:
    """Return what FlashAttention-2's backward takes beside the gradients.

    Args:
        rows: Queries of all samples, as the kernel pads them.
        key_rows: Keys of all samples.
        heads: Of the queries and of the keys; gradients of shared heads are made for each query head, then summed.
        size: Head size.
        dtype: Of the inputs.

    Source:
        mha_bwd and mha_varlen_bwd, csrc/flash_attn/flash_api.cpp of flash-attn 2, vendored in torch as
        aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: ``softmax_d``, ``dq_accum``, ``dk_expanded``
        and ``dv_expanded``.
    """
    columns = -(-size // 32) * 32
    wide = (((key_rows, heads[0], size), dtype),) * 2 if heads[0] != heads[1] else ()
    return (((rows, heads[0]), torch.float32), ((rows, heads[0], columns), torch.float32), *wide)


def make_output(query: Tensor, value: Tensor) -> Tensor:
    """Return (B, heads, S, value size), laid out as torch's kernels do: all heads of a token beside each other."""
    batch, heads, length, _ = query.shape
    return torch.empty((batch, length, heads, value.shape[-1]), dtype=query.dtype, device="meta").transpose(1, 2)


def _make(buffers: tuple[Buffer, ...]) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in buffers]


class _Fused(torch.autograd.Function):
    """Keeps query, key, value, mask, output and what the kernel says."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kernel: Kernel) -> Any:
        # Not the kernel itself: ``make_output`` holds inputs, which saved tensors alone may keep alive.
        ctx.note, ctx.work, ctx.scratch = kernel.note, kernel.work, kernel.scratch
        ctx.set_materialize_grads(False)
        kernel.note(*kernel.work, False)
        output = kernel.make_output()
        kept = _make(kernel.kept)
        ctx.save_for_backward(query, key, value, mask, output, *kept)
        return (output, kept[0]) if kernel.returns_sums else output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        ctx.note(*ctx.work, True)
        if grad_output is not None and not grad_output.is_contiguous() and grad_output.stride(-1) != 1:
            grad_output = grad_output.contiguous()
        grads = [torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)]
        scratch = _make(ctx.scratch)
        del scratch
        return (*grads, None, None)
