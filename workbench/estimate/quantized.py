"""bitsandbytes on meta tensors: the state beside a packed weight, outlier columns, scratch memory of kernels."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..recipe import Recipe

# Elements of a weight that share one scale, and of scales that share one with double quantization.
# Source: quantize_4bit, bitsandbytes/functional.py.
BLOCK_4BIT = 64
BLOCK_NESTED = 256
# Share of the columns that LLM.int8() multiplies in 16 bits. It depends on the weights; the paper (arXiv:2208.07339,
# section 3) finds 0.1 % of the features.
OUTLIER_FRACTION = 0.001
# Rows above which a 4-bit product always unpacks the weight. Source: _gemm_4bit_custom_max_m,
# bitsandbytes/backends/cuda/ops.py 0.50.
FUSED_MAX_ROWS = 1536


def add_quant_states(model: nn.Module, recipe: Recipe, dtype: torch.dtype) -> None:
    """Give every packed meta weight of ``model`` the state that quantizing a real one makes.

    Args:
        model: From ``build_model(place="meta")``.
        recipe: The settings.
        dtype: Dtype the weights had before they were packed.
    """
    if not recipe.quantization.bits:
        return
    import bitsandbytes
    from bitsandbytes.functional import QuantState

    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight: Any = module.weight
            if getattr(weight, "quant_state", None) is None:
                shape = torch.Size((module.out_features, module.in_features))
                weight.quant_state = _quant_state(QuantState, shape, dtype, recipe)
                module.quant_state = weight.quant_state
            if module.bias is not None and module.compute_dtype is not None:
                # The first forward pass casts the bias for good; a trace stands for every pass, so it is done before.
                module.bias.data = module.bias.data.to(module.compute_dtype)
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            weight = module.weight
            if module.state.CB is None:
                module.state.CB = weight.data
                module.state.SCB = torch.empty(module.out_features, dtype=torch.float32, device="meta")
                weight.CB = weight.SCB = None
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            module.state.is_training = True


def _quant_state(kind: Any, shape: torch.Size, dtype: torch.dtype, recipe: Recipe) -> Any:
    blocks = -(-shape.numel() // BLOCK_4BIT)
    code = torch.empty(16, dtype=torch.float32, device="meta")
    if not recipe.quantization.bnb_4bit_use_double_quant:
        absmax = torch.empty(blocks, dtype=torch.float32, device="meta")
        return kind(
            absmax=absmax, shape=shape, code=code, blocksize=BLOCK_4BIT, dtype=dtype,
            quant_type=recipe.quantization.bnb_4bit_quant_type,
        )  # fmt: skip
    inner = kind(
        absmax=torch.empty(-(-blocks // BLOCK_NESTED), dtype=torch.float32, device="meta"),
        code=torch.empty(256, dtype=torch.float32, device="meta"),
        blocksize=BLOCK_NESTED,
        dtype=torch.float32,
    )
    return kind(
        absmax=torch.empty(blocks, dtype=torch.uint8, device="meta"),
        shape=shape,
        code=code,
        blocksize=BLOCK_4BIT,
        dtype=dtype,
        quant_type=recipe.quantization.bnb_4bit_quant_type,
        offset=torch.empty((), dtype=torch.float32, device="meta"),
        state2=inner,
    )


def quant_parts(parameter: nn.Parameter, module: nn.Module) -> list[Tensor]:
    """Return the tensors beside a quantized weight: block scales, code tables, nested scales, row scales."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        scales = getattr(getattr(module, "state", None), "SCB", None)
        return [scales] if isinstance(scales, Tensor) else []
    parts = [state.absmax, state.code]
    if state.nested:
        parts += [state.offset, state.state2.absmax, state.state2.code]
    return parts


def stand_in(func: Any, args: Any) -> Any:
    """Return the result of a bitsandbytes operator whose shape depends on values, or None for other operators."""
    name = func._schema.name
    if name == "bitsandbytes::int8_vectorwise_quant":
        source, threshold = args[0], args[1] if len(args) > 1 else 0.0
        packed = torch.empty(source.shape, dtype=torch.int8, device="meta")
        rows = torch.empty(source.numel() // source.shape[-1], dtype=torch.float32, device="meta")
        columns = None
        if threshold:
            count = max(1, round(source.shape[-1] * OUTLIER_FRACTION))
            columns = torch.empty(count, dtype=torch.int64, device="meta")
        return packed, rows, columns
    if name == "bitsandbytes::int8_mixed_scaled_mm":
        source, _, weight, _, _, columns = args[:6]
        output = torch.empty((*source.shape[:-1], weight.shape[0]), dtype=source.dtype, device="meta")
        outliers = None
        if columns is not None:
            outliers = torch.empty(
                (source.numel() // source.shape[-1], columns.numel()), dtype=source.dtype, device="meta"
            )
        return output, outliers
    return None


@dataclass(frozen=True)
class Card:
    """What decides which kernels bitsandbytes runs on a CUDA target.

    Attributes:
        capability: Compute capability; None on a CPU, where the reference code runs, and where it is not known.
        sm_count: Streaming multiprocessors.
    """

    capability: tuple[int, int] | None = None
    sm_count: int = 0


@functools.cache
def _fused_rule() -> Any:
    """Return bitsandbytes' own choice between its fused 4-bit product and unpacking, or None where it has none.

    The function stands in a module that cannot be imported without CUDA, so it is compiled from that module's text.
    """
    import bitsandbytes

    path = Path(bitsandbytes.__file__).parent / "backends" / "cuda" / "ops.py"
    wanted = {"_gemm_4bit_use_custom_cuda", "_GEMM_4BIT_CUSTOM_FLOOR_M"}
    found: list[ast.stmt] = [
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if (isinstance(node, ast.FunctionDef) and node.name in wanted)
        or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in wanted)
    ]
    if len(found) != len(wanted):
        return None
    for node in found:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list.clear()  # it remembers answers by the number of a device
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(found, []), str(path), "exec"), names)  # the installed package's own code
    return names


def runs_fused(rows: int, shape: tuple[int, int], dtype: torch.dtype, card: Card) -> bool:
    """Whether a 4-bit product is one kernel on ``card``, without the unpacked weight beside it.

    Args:
        rows: Tokens.
        shape: (out, in) of the weight.
        dtype: Of the tokens.
        card: The target.

    Source:
        ``gemm_4bit`` and ``_gemm_4bit_use_custom_cuda``, bitsandbytes/backends/cuda/ops.py 0.50.
    """
    rule = _fused_rule() if card.capability is not None and rows <= FUSED_MAX_ROWS else None
    if rule is None or card.capability is None:
        return False
    major, minor = card.capability
    rule["_gpu_dispatch_props"] = lambda _: (card.sm_count, major, minor)
    return bool(rule["_gemm_4bit_use_custom_cuda"](0, dtype, rows, *shape))


def transient_bytes(func: Any, args: Any, kwargs: Any, card: Card) -> list[int]:
    """Return memory that a bitsandbytes kernel takes before its result and gives back after it, in that order.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Its keyword arguments.
        card: The target.

    Source:
        ``_dequant_linear_fallback``, bitsandbytes/backends/cuda/ops.py 0.50; ``int8_scaled_mm``,
        bitsandbytes/backends/default/ops.py.
    """
    name = func._schema.name
    if name == "bitsandbytes::gemm_4bit":
        source, _, shape = args[:3]
        if runs_fused(source.numel() // source.shape[-1], (shape[0], shape[1]), source.dtype, card):
            return []
        sizes = [shape[0] * shape[1] * source.itemsize]
        nested = kwargs.get("absmax_8bit")
        if nested is not None:
            sizes = [4 * nested.numel(), 4 * nested.numel(), *sizes]
        return sizes
    if name in ("bitsandbytes::int8_scaled_mm", "bitsandbytes::int8_mixed_scaled_mm"):
        left = args[0]
        columns = (args[1] if name.endswith("int8_scaled_mm") and "mixed" not in name else args[2]).shape[0]
        return [4 * (left.numel() // left.shape[-1]) * columns]  # the int32 product before it is scaled
    return []
