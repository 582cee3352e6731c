"""Which attention kernel a device would choose, and the storages that kernel makes, on meta tensors.

Calling ``scaled_dot_product_attention`` on meta tensors decomposes into the S x S products that no GPU makes. Here the
choice is made by the rules of torch's dispatcher, and the fused kernels are stood in for by functions that make the
same outputs, keep the same tensors for backward and take the same scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .optimizers import without_modes

# Rows of the log-sum-exp are padded to a multiple of this by the memory-efficient kernel.
# Source: kAlignLSE, aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h.
EFFICIENT_LSE_ROWS = 32
# Flash backward pads the sequence of its float32 accumulators to this.
# Source: round_multiple(seqlen, 128), aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
FLASH_ROWS = 128
MAX_FLASH_HEAD = 256

# Told ``(flops, bytes, dtype, is_backward)`` of a fused kernel.
Note = Callable[[int, int, str, bool], None]


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    capability: tuple[int, int],
    enable_gqa: bool = False,
) -> str:
    """Return ``"flash"``, ``"efficient"`` or ``"math"``: what torch runs on a CUDA device.

    Args:
        query: (B, heads, S, head size).
        key: (B, key heads, S, head size).
        value: Like ``key``.
        mask: Additive or boolean mask, or None.
        capability: Compute capability of the device.
        enable_gqa: Whether the kernel is asked to share key heads.

    Source:
        ``select_sdp_backend``, ``use_flash_attention``, ``use_mem_efficient_attention`` in
        aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. cuDNN's kernel, preferred on Hopper by some versions,
        keeps the same tensors as flash.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    size = query.shape[-1]
    same_size = size == key.shape[-1] == value.shape[-1]
    if capability >= (8, 0) and half and mask is None and same_size and size <= MAX_FLASH_HEAD:
        return "flash"
    # The memory-efficient kernel has no shared key heads; bfloat16 needs Ampere.
    shares_heads = enable_gqa and key.shape[1] != query.shape[1]
    dtype_fits = query.dtype in (torch.float16, torch.float32) or (
        query.dtype == torch.bfloat16 and capability >= (8, 0)
    )
    alignment = 4 if query.dtype == torch.float32 else 8
    aligned = size % alignment == 0 and value.shape[-1] % alignment == 0
    if capability >= (5, 0) and dtype_fits and aligned and not shares_heads:
        return "efficient"
    return "math"


def attend_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    capability: tuple[int, int],
    note: Note,
    kernel: str | None = None,
) -> Tensor:
    """Stand in for ``scaled_dot_product_attention`` on a CUDA device; ``note`` is told what the fused kernels do.

    ``kernel`` pins the kernel. Who pins the memory-efficient one for shared key heads, which it refuses, has to repeat
    the heads first; so does this.
    """
    if kernel == "efficient" and key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
    kernel = kernel or choose_kernel(query, key, value, attn_mask, capability=capability, enable_gqa=enable_gqa)
    mask = _float_mask(attn_mask, query.dtype)
    if kernel == "math":
        return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
    if kernel == "flash":
        size = query.shape[-1]
        padding = -size % 8
        if padding:
            query, key, value = (functional.pad(item, (0, padding)) for item in (query, key, value))
        result: Tensor = _Flash.apply(query, key, value, is_causal, note)  # type: ignore[no-untyped-call]
        return result[..., :size] if padding else result
    if mask is not None:
        mask = _aligned_mask(mask, query, key)
    return _Efficient.apply(query, key, value, mask, is_causal, note)  # type: ignore[no-untyped-call]


def attend_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stand in for ``scaled_dot_product_attention`` on the CPU: torch itself is asked which kernel it would run."""
    mask = _float_mask(attn_mask, query.dtype)
    stand_ins = [_expanded(item.shape, item.dtype) for item in (query, key, value)]
    shown = None if mask is None else _expanded(mask.shape, mask.dtype)
    with without_modes():
        query_like, key_like, value_like = stand_ins
        choice = torch._fused_sdp_choice(
            query_like, key_like, value_like, shown, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if choice == 1:  # SDPBackend.FLASH_ATTENTION
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attend(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
    return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)


def _expanded(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a real CPU tensor of a shape that holds one row only."""
    with without_modes():
        return torch.empty(shape[-1], dtype=dtype).expand(shape)


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _float_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the additive mask a boolean one is turned into; source: ``convert_boolean_attn_mask``, attention.cpp."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype, device="meta"), -math.inf)


def _aligned_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask as the memory-efficient kernel takes it: its last side a multiple of 16 bytes' worth.

    Source:
        ``pad_bias``, aten/src/ATen/native/transformers/attention.cpp.
    """
    alignment = 16
    length = mask.shape[-1]
    if length % alignment:
        mask = functional.pad(mask, (0, alignment - length % alignment))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _like_output(query: Tensor, value: Tensor) -> Tensor:
    batch, heads, length, _ = query.shape
    return torch.empty((batch, length, heads, value.shape[-1]), dtype=query.dtype, device="meta").transpose(1, 2)


class _Flash(torch.autograd.Function):
    """FlashAttention-2: keeps query, key, value, output and one float32 a row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, note: Note) -> Tensor:
        batch, heads, length, _ = query.shape
        ctx.is_causal, ctx.note = is_causal, note
        note(*_attention_work(query, key, value, is_causal), False)
        output = _like_output(query, value)
        row_sums = torch.empty((batch, heads, length), dtype=torch.float32, device="meta")
        state = torch.empty(2, dtype=torch.int64, device="meta")
        ctx.save_for_backward(query, key, value, output, row_sums, state)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        ctx.note(*_attention_work(query, key, value, ctx.is_causal), True)
        batch, heads, length, size = query.shape
        rows = -(-length // FLASH_ROWS) * FLASH_ROWS
        columns = -(-size // 32) * 32
        if not grad_output.is_contiguous() and grad_output.stride(-1) != 1:
            grad_output = grad_output.contiguous()
        grads = [torch.empty_like(query), *_key_grads(key, value)]
        sums = torch.empty((batch, heads, rows), dtype=torch.float32, device="meta")
        accumulated = torch.empty((batch, rows, heads, columns), dtype=torch.float32, device="meta")
        if key.shape[1] != heads:  # Shared key heads: gradients of every query head, then summed.
            wide = [torch.empty((batch, key.shape[2], heads, size), dtype=key.dtype, device="meta") for _ in range(2)]
            del wide
        del sums, accumulated
        return (*grads, None, None)


class _Efficient(torch.autograd.Function):
    """The memory-efficient (CUTLASS) kernel: keeps the mask as well, and pads the rows of its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, note: Note
    ) -> Tensor:
        batch, heads, length, _ = query.shape
        ctx.is_causal, ctx.note = is_causal, note
        note(*_attention_work(query, key, value, is_causal), False)
        output = _like_output(query, value)
        rows = -(-length // EFFICIENT_LSE_ROWS) * EFFICIENT_LSE_ROWS
        row_sums = torch.empty((batch, heads, rows), dtype=torch.float32, device="meta")
        ctx.save_for_backward(query, key, value, mask, output, row_sums)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        ctx.note(*_attention_work(query, key, value, ctx.is_causal), True)
        batch, heads, length, size = query.shape
        if not grad_output.is_contiguous() and grad_output.stride(-1) != 1:
            grad_output = grad_output.contiguous()
        grads = [torch.empty_like(query), *_key_grads(key, value)]
        delta = torch.empty((batch, heads, length), dtype=torch.float32, device="meta")
        if query.dtype != torch.float32:  # float32 accumulator of the query's gradient
            rows = -(-length // 64) * 64
            scratch = torch.empty((batch, heads, rows, -(-size // 32) * 32), dtype=torch.float32, device="meta")
            del scratch
        del delta
        return (*grads, None, None, None)


def _attention_work(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[int, int, str]:
    """Return ``(flops, bytes, dtype)`` of the forward pass: two products over all pairs, half of them when causal."""
    batch, heads, length, size = query.shape
    pairs = batch * heads * length * key.shape[2]
    flops = 2 * pairs * (size + value.shape[-1])
    moved = (2 * query.numel() + key.numel() + value.numel()) * query.itemsize
    return (flops // 2 if is_causal else flops), moved, str(query.dtype)[6:]


def _key_grads(key: Tensor, value: Tensor) -> list[Tensor]:
    return [torch.empty_like(key), torch.empty_like(value)]
