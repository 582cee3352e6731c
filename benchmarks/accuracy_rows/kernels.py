"""Stand-ins for kernels that published runs used and torch does not have: the same storages, no arithmetic.

A fused kernel is one operator whose temporaries live on the chip. What counts for memory is what it returns, what it
keeps for backward and whether backward writes into what it was given.

Source:
    unsloth/kernels (rms_layernorm.py, rope_embedding.py, cross_entropy_loss.py), copied into fms-acceleration-foak;
    liger_kernel/ops/fused_linear_cross_entropy.py; auto_gptq's Triton v2 QuantLinear.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class _FusedNorm(torch.autograd.Function):
    """RMSNorm: keeps its input and one float32 a row; backward writes over the gradient it is given."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        rows = torch.empty(hidden.shape[:-1], dtype=torch.float32, device=hidden.device)
        ctx.save_for_backward(hidden, weight, rows)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        weight = ctx.saved_tensors[1]
        return grad, torch.empty_like(weight) if weight.requires_grad else None


class _FusedCrossEntropy(torch.autograd.Function):
    """Cross entropy of all tokens: keeps the logits and one float32 a row; backward writes over the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        rows = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        ctx.save_for_backward(logits, rows)
        return torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        logits: Tensor = ctx.saved_tensors[0]
        return logits


class _FusedHeadLoss(torch.autograd.Function):
    """Liger: output head and loss in chunks of tokens; gradients are computed in forward and kept until backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        tokens, width = hidden.shape
        vocabulary = weight.shape[0]
        chunk = 1 << (max(1, -(-tokens // -(-vocabulary // width))) - 1).bit_length()
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
        for start in range(0, tokens, chunk):
            piece = hidden[start : start + chunk]
            logits = (piece @ weight.t()).float()
            logits = logits.to(hidden.dtype)
            grad_hidden[start : start + chunk] = logits @ weight
            if grad_weight is not None:
                grad_weight.addmm_(logits.t(), piece)
            del logits
        ctx.save_for_backward(grad_hidden, grad_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden, grad_weight


def _apply(function: Any, *args: Any) -> Any:
    """Run a stand-in with function modes off: what it saves must name the device it is on, not the target."""
    with torch._C.DisableTorchFunction():
        return function.apply(*args)


class GptqLinear(nn.Module):
    """int4 weights in groups of 128 with scales and zeros; products without a dequantised copy."""

    GROUP = 128

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        groups = self.in_features // self.GROUP

        def put(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))

        put("qweight", (self.in_features // 8, self.out_features), torch.int32)
        put("qzeros", (groups, self.out_features // 8), torch.int32)
        put("scales", (groups, self.out_features), torch.float16)
        put("g_idx", (self.in_features,), torch.int32)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (..., out) for (..., in), in float16."""
        result: Tensor = _apply(_GptqProduct, hidden, self.out_features)
        return result


class _GptqProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, width: int) -> Tensor:
        ctx.like = (hidden.shape, hidden.dtype)
        hidden = hidden.to(torch.float16)
        return torch.empty((*hidden.shape[:-1], width), dtype=torch.float16, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=torch.float16, device=grad.device).to(dtype), None


def fused_cross_entropy(logits: Tensor) -> Tensor:
    """Return the mean loss of (N, V) logits as the Triton kernel does."""
    losses: Tensor = _apply(_FusedCrossEntropy, logits)
    return losses.sum() / logits.shape[0]


def fused_head_loss(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the mean loss of (N, H) hidden states under an output head as Liger computes it."""
    total: Tensor = _apply(_FusedHeadLoss, hidden, weight)
    return total / hidden.shape[0]


def fuse_norms(model: nn.Module) -> nn.Module:
    """Give every RMSNorm of the model the fused kernel."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        result: Tensor = _apply(_FusedNorm, hidden, self.weight)
        return result

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(forward, module)
    return model


def quantize_gptq(model: nn.Module) -> nn.Module:
    """Put GPTQ's int4 classes in place of the Linear modules of the layers, below their adapters."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            is_adapter = name in ("default",) or ("lora" in type(parent).__name__.lower() and name != "base_layer")
            if isinstance(child, nn.Linear) and type(child) is nn.Linear and not is_adapter and name != "lm_head":
                setattr(parent, name, GptqLinear(child))
    return model


@contextlib.contextmanager
def fused_rotary() -> Iterator[None]:
    """Let Mistral's and Llama's code rotate in place, as the Triton kernel does, while the context is entered."""
    from transformers.models.llama import modeling_llama
    from transformers.models.mistral import modeling_mistral

    modules: tuple[Any, ...] = (modeling_llama, modeling_mistral)
    before: list[Callable[..., Any]] = [module.apply_rotary_pos_emb for module in modules]
    for module in modules:
        module.apply_rotary_pos_emb = _rotate
    try:
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.apply_rotary_pos_emb = function


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return query, key
