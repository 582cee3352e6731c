"""Which attention kernel a device would choose, and the storages that kernel makes, on meta tensors.

Calling ``scaled_dot_product_attention`` on meta tensors decomposes into the S x S products that no GPU makes. Here the
choice is made by the rules of torch's dispatcher, and the fused kernels are stood in for by functions that make the
same outputs, keep the same tensors for backward and take the same scratch memory.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from .fused import FLASH_ROWS, Buffer, Kernel, Note, attention_work, flash_scratch, make_output, run_kernel
from .optimizers import without_modes

# Rows of the log-sum-exp are padded to a multiple of this by the memory-efficient kernel.
# Source: kAlignLSE, aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h.
EFFICIENT_LSE_ROWS = 32
MAX_FLASH_HEAD = 256


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
        result: Tensor = run_kernel(query, key, value, None, _flash_kernel(query, key, value, is_causal, note))
        return result[..., :size] if padding else result
    if mask is not None:
        mask = _aligned_mask(mask, query, key)
    attended: Tensor = run_kernel(query, key, value, mask, _efficient_kernel(query, key, value, is_causal, note))
    return attended


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


def _flash_kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, note: Note) -> Kernel:
    """FlashAttention-2: keeps one float32 a row beside query, key, value and output."""
    batch, heads, length, size = query.shape
    rows = -(-length // FLASH_ROWS) * FLASH_ROWS
    return Kernel(
        note=note,
        work=attention_work(query.shape, key.shape, query.dtype, is_causal, value_size=value.shape[-1]),
        make_output=functools.partial(make_output, query, value),
        kept=(((batch, heads, length), torch.float32), ((2,), torch.int64)),
        scratch=flash_scratch(batch * rows, batch * key.shape[2], (heads, key.shape[1]), size, query.dtype),
    )


def _efficient_kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, note: Note) -> Kernel:
    """The memory-efficient (CUTLASS) kernel: pads the rows of its log-sum-exp.

    Backward takes a float32 a row, and a float32 accumulator of the query's gradient where that is no float32.
    """
    batch, heads, length, size = query.shape
    rows, blocks = -(-length // EFFICIENT_LSE_ROWS) * EFFICIENT_LSE_ROWS, -(-length // 64) * 64
    scratch: tuple[Buffer, ...] = (((batch, heads, length), torch.float32),)
    if query.dtype != torch.float32:
        scratch += (((batch, heads, blocks, -(-size // 32) * 32), torch.float32),)
    return Kernel(
        note=note,
        work=attention_work(query.shape, key.shape, query.dtype, is_causal, value_size=value.shape[-1]),
        make_output=functools.partial(make_output, query, value),
        kept=(((batch, heads, rows), torch.float32),),
        scratch=scratch,
    )
