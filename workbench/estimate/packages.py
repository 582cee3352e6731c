"""Attention that is no operator of torch's dispatcher: the package flash-attn, and FlexAttention, which is compiled.

transformers' own code around them runs in a trace as it does in a run: it removes padding, finds packed samples and
makes the block mask. Only the kernels at the end are stood in for. The stand-ins take the place of names in
transformers' modules for the thread that traces; other threads see the originals.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .fused import FLASH_ROWS, Kernel, Note, attention_work, flash_scratch, make_output, run_kernel

# Rows added for each sequence to backward's accumulators where sequences of several lengths lie in one.
# Source: mha_varlen_bwd, csrc/flash_attn/flash_api.cpp of flash-attn 2.8.
VARLEN_ROWS = 128


@contextlib.contextmanager
def replaced_here(owner: Any, name: str, stand_in: Callable[..., Any]) -> Iterator[None]:
    """Let ``stand_in`` answer for ``owner.name`` in this thread; other threads see no change."""
    original, thread = getattr(owner, name), threading.get_ident()

    @functools.wraps(original)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if threading.get_ident() == thread else original)(*args, **kwargs)

    setattr(owner, name, answer)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def flash_package(
    note: Note, finding: Callable[[], contextlib.AbstractContextManager[None]], is_packed: bool
) -> Iterator[None]:
    """Stand in for the package flash-attn.

    Args:
        note: Told what the kernels compute.
        finding: Entered while the real tokens of a padded batch are looked for.
        is_packed: Whether a batch's position ids tell of several samples, which no value of a trace can.
    """
    from transformers import modeling_flash_attention_utils as utils

    dense, varlen = _flash_functions(note)
    functions = (dense, varlen, None, utils._pad_input, utils._unpad_input)
    process = (utils._lazy_define_process_function(varlen), dict)
    find_real, judge = utils._get_unpad_data, utils._is_packed_sequence

    def get_unpad_data(attention_mask: Tensor) -> Any:
        with finding():
            indices, bounds, _ = find_real(attention_mask)
        return indices, bounds, attention_mask.shape[1]

    def is_packed_sequence(position_ids: Any, batch_size: int) -> bool:
        return judge(position_ids, batch_size) is not False and is_packed

    with (
        replaced_here(utils, "lazy_import_flash_attention", lambda *_, **__: (functions, process)),
        replaced_here(utils, "_get_unpad_data", get_unpad_data),
        replaced_here(utils, "_is_packed_sequence", is_packed_sequence),
    ):
        yield


def _flash_functions(note: Note) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return stand-ins for ``flash_attn_func`` and ``flash_attn_varlen_func``.

    Source:
        FlashAttnFunc and FlashAttnVarlenFunc, flash_attn/flash_attn_interface.py, and csrc/flash_attn/flash_api.cpp of
        flash-attn 2.8: kept are query, key, value, output, a float32 a row and the state of the random numbers.
    """

    def dense(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
        window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    ) -> Tensor:  # fmt: skip
        batch, length, heads, _ = q.shape
        return _run_flash(q, k, v, causal, window_size, note, (batch, heads, length), (k.shape[2], k.shape[1]))

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None,
        max_seqlen_k: Any = None, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
        window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    ) -> Tensor:  # fmt: skip
        batch = max(1, cu_seqlens_q.shape[0] - 1)
        return _run_flash(q, k, v, causal, window_size, note, (batch, q.shape[1], None), (k.shape[1], None))

    return dense, varlen


def _run_flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: Any, note: Note, rows: Any, keys: Any
) -> Tensor:  # fmt: skip
    """Run a stand-in.

    Args:
        q, k, v: (B, S, heads, size), or (tokens, heads, size) of samples that lie one behind the other.
        causal: Whether a query sees the keys before it only.
        window: Keys seen before and after, -1 for all.
        note: Told of the work.
        rows: ``(samples, heads, length)`` of the queries, the length None where tokens lie one behind the other.
        keys: ``(heads, length)`` of the keys.
    """
    size = q.shape[-1]
    if size % 8:
        q, k, v = (functional.pad(item, (0, -size % 8)) for item in (q, k, v))
    batch, heads, length = rows
    key_heads, key_length = keys
    if length is None:
        sums: tuple[int, ...] = (heads, q.shape[0])
        padded = q.shape[0] + VARLEN_ROWS * batch
        length, key_length = math.ceil(q.shape[0] / batch), math.ceil(k.shape[0] / batch)
    else:
        sums, padded = (batch, heads, length), batch * math.ceil(length / FLASH_ROWS) * FLASH_ROWS
    kernel = Kernel(
        note=note,
        work=attention_work(
            (batch, heads, length, q.shape[-1]),
            (batch, key_heads, key_length),
            q.dtype,
            causal,
            window=_seen(window, causal),
        ),
        make_output=functools.partial(torch.empty_like, q),
        kept=((sums, torch.float32), ((2,), torch.int64)),
        scratch=flash_scratch(padded, k.numel() // (key_heads * k.shape[-1]), (heads, key_heads), q.shape[-1], q.dtype),
    )
    output: Tensor = run_kernel(q, k, v, None, kernel)
    return output[..., :size] if size % 8 else output


def _seen(window: tuple[int, int], causal: bool) -> int | None:
    """Return how many keys a query sees; None where all (of those before it)."""
    before, after = window
    if before < 0 or (after < 0 and not causal):
        return None
    return before + 1 if causal else before + after + 1


@contextlib.contextmanager
def flex_package(note: Note) -> Iterator[None]:
    """Stand in for FlexAttention's compiled kernels.

    Args:
        note: Told what the kernels compute.
    """
    from transformers import masking_utils
    from transformers.integrations import flex_attention

    with (
        replaced_here(masking_utils, "create_block_mask", _block_mask),
        replaced_here(flex_attention, "compile_friendly_flex_attention", functools.partial(_run_flex, note)),
    ):
        yield


def _block_mask(mask_mod: Any, B: int, H: Any, Q_LEN: int, KV_LEN: int, **_: Any) -> Any:  # noqa: N803  # torch's names
    """Return the block mask: for each block of queries the blocks of keys it sees in part and in whole, and back.

    Compiled, its making keeps no mask of S x S; source: ``create_block_mask``, torch/nn/attention/flex_attention.py.
    """
    from torch.nn.attention.flex_attention import _DEFAULT_SPARSE_BLOCK_SIZE as BLOCK
    from torch.nn.attention.flex_attention import BlockMask

    batch, heads = B or 1, H or 1
    rows, columns = math.ceil(Q_LEN / BLOCK), math.ceil(KV_LEN / BLOCK)

    def blocks(one: int, other: int) -> tuple[Tensor, Tensor]:
        shapes = ((batch, heads, one), (batch, heads, one, other))
        counts, indices = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes)
        return counts, indices

    # Blocks seen in part and in whole, from the side of the queries and from that of the keys.
    part, entire, part_back, entire_back = (blocks(*pair) for pair in 2 * ((rows, columns),) + 2 * ((columns, rows),))
    return BlockMask(
        (Q_LEN, KV_LEN), part[0], part[1], entire[0], entire[1], part_back[0], part_back[1], entire_back[0],
        entire_back[1], (BLOCK, BLOCK), mask_mod,
    )  # fmt: skip


def _run_flex(
    note: Note, query: Tensor, key: Tensor, value: Tensor, training: bool = False, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Stand in for the compiled ``flex_attention``: keeps query, key, value, output and a float32 a row.

    Source:
        ``flex_attention`` and ``flex_attention_backward``, torch/_inductor/kernel/flex/flex_attention.py: the output
        lies in memory as the query does; backward takes a float32 a row for its deltas, and no accumulators. Autocast
        casts its inputs: ``_flex_attention_autocast_impl``, torch/_higher_order_ops/flex_attention.py.
    """
    from torch.nn.attention.flex_attention import AuxOutput

    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    sums = ((tuple(query.shape[:3]), torch.float32),)
    is_masked = kwargs.get("block_mask") is not None
    kernel = Kernel(
        note=note,
        # A block mask is nearly always causal; one of a window leaves out more.
        work=attention_work(query.shape, key.shape, query.dtype, is_masked, value_size=value.shape[-1]),
        make_output=functools.partial(make_output, query, value),
        kept=sums,
        scratch=sums,
        returns_sums=True,
    )
    output, row_sums = run_kernel(query, key, value, None, kernel)
    return output, AuxOutput(lse=row_sums)
