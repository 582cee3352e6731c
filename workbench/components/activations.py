"""What chosen layers keep for backward: tensors as they are, in 8 or 4 bits, or in host memory.

The hooks are torch's ``saved_tensors_hooks``, entered around a layer. Parameters, masks, indices and the statistics of
attention kernels (log-sum-exp) are kept as they are: they are small, or an error in them is not an error of an
activation. Of a checkpointed layer only its input is kept, and that is what is compressed or moved.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Problem, RecipeError
from ..recipe import Recipe
from .layers import decoder_layers

# Values that share one scale. 4-bit blocks are smaller: with 15 levels one outlier would flatten its whole block.
BLOCK = {8: 256, 4: 64}
# Smaller tensors are not worth an operator more.
MIN_ELEMENTS = 1024

# Who moves a tensor to host memory: torch, or a trace or an emulated GPU, for which the host is another place than
# where its own tensors lie. A context variable belongs to one thread.
_MOVER: contextvars.ContextVar[Callable[[Tensor], Callable[[], Tensor]] | None] = contextvars.ContextVar(
    "host_mover", default=None
)

_WHOLE: contextvars.ContextVar[bool] = contextvars.ContextVar("whole_activations", default=False)


def keep_activations(recipe: Recipe, model: nn.Module) -> None:
    """Let the chosen layers of ``model`` keep their saved tensors as ``training.activation_storage`` says.

    Args:
        recipe: The settings.
        model: The base model, before or after an adapter was attached.

    Raises:
        RecipeError: A chosen layer does not exist.
    """
    storage = recipe.training.activation_storage
    if storage == "full":
        return
    layers = decoder_layers(model)
    chosen = recipe.training.activation_storage_layers
    beyond = [index for index in chosen if index >= len(layers)]
    if beyond:
        raise RecipeError(
            [
                Problem(
                    "training.activation_storage_layers",
                    f"layer {beyond[0]} does not exist; this model has layers 0 to {len(layers) - 1}.",
                    (("training.activation_storage_layers", ()),),
                )
            ]
        )
    for index, layer in enumerate(layers):
        if not chosen or index in chosen:
            _Keeper(layer, storage)


@contextlib.contextmanager
def host_mover(mover: Callable[[Tensor], Callable[[], Tensor]]) -> Iterator[None]:
    """Let ``mover(tensor)`` stand in for the copy to host memory in this thread; what it returns brings it back."""
    token = _MOVER.set(mover)
    try:
        yield
    finally:
        _MOVER.reset(token)


@contextlib.contextmanager
def whole_activations() -> Iterator[None]:
    """Let layers keep what they save as it is in this thread, whatever the Recipe says: to compare gradients."""
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


class Compressed:
    """A tensor in 8 or 4 bits with one float32 scale a block.

    Args:
        tensor: Any floating dtype; its number of elements must be even for 4 bits.
        bits: 8 or 4.
    """

    __slots__ = ("_bits", "_codes", "_dtype", "_scales", "_shape")

    def __init__(self, tensor: Tensor, bits: int) -> None:
        self._bits, self._dtype, self._shape = bits, tensor.dtype, tensor.shape
        values = tensor.detach().reshape(-1, block_size(tensor.numel(), bits))
        levels = 127 if bits == 8 else 7
        scales = values.abs().amax(dim=1, keepdim=True).float().div_(levels).clamp_(min=torch.finfo(torch.float32).tiny)
        codes = values.div(scales).round_()
        if bits == 8:
            self._codes = codes.to(torch.int8)
        else:
            whole = codes.add_(8).to(torch.uint8)
            self._codes = whole[:, 0::2] | (whole[:, 1::2] << 4)
        self._scales = scales

    def restore(self) -> Tensor:
        """Return the tensor in its dtype and shape; off by at most half a level of its block."""
        if self._bits == 8:
            values = self._codes.to(self._dtype)
        else:
            pair = torch.stack((self._codes & 15, self._codes >> 4), dim=2).flatten(1)
            values = pair.to(self._dtype).sub_(8)
        return values.mul_(self._scales).view(self._shape)


def block_size(num_elements: int, bits: int) -> int:
    """Return the largest power of two up to ``BLOCK[bits]`` that divides ``num_elements``."""
    return min(BLOCK[bits], num_elements & -num_elements)


class _Keeper:
    """Enters torch's hooks while one layer runs forward."""

    def __init__(self, layer: nn.Module, storage: str) -> None:
        self._layer = weakref.ref(layer)
        self._bits = {"8bit": 8, "4bit": 4}.get(storage, 0)
        self._open: list[Any] = []
        self._parameters: frozenset[int] = frozenset()
        self._lengths: frozenset[int] = frozenset()
        # Several operators save the same tensor (the input of q, k and v): it is packed once. The weak references to
        # the storages keep a new storage at an old address from being taken for the old one.
        self._packed: dict[tuple[Any, ...], tuple[weakref.ref[Any], Any]] = {}
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.register_forward_hook(self._leave, always_call=True)

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hooks: Any = contextlib.nullcontext()
        if layer.training and torch.is_grad_enabled() and not _WHOLE.get():
            hidden = args[0] if args else kwargs.get("hidden_states")
            self._lengths = frozenset(hidden.shape[1:2]) if isinstance(hidden, Tensor) else frozenset()
            tensors = [*layer.parameters(), *layer.buffers()]
            self._parameters = frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        self._open.append(hooks)

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._packed.clear()
        self._open.pop().__exit__(None, None, None)

    def _is_activation(self, tensor: Tensor) -> bool:
        """Whether a saved tensor is an activation: floating, of some size, no weight, no log-sum-exp of a kernel."""
        if not tensor.is_floating_point() or tensor.numel() < MIN_ELEMENTS or tensor.numel() % 2:
            return False
        if tensor.untyped_storage()._cdata in self._parameters:
            return False
        # (B, 1, S, S), or spread over the heads without a copy, is a mask whose -inf would make its whole block NaN.
        is_square = tensor.ndim == 4 and {*tensor.shape[2:]} <= self._lengths
        if is_square and (tensor.shape[1] == 1 or tensor.stride(1) == 0):
            return False
        # (B, heads, S) is what fused attention keeps to compute its probabilities again: exp() of an error in it.
        is_statistic = tensor.ndim == 3 and tensor.shape[2] in self._lengths and tensor.shape[1] not in self._lengths
        return not is_statistic

    def _pack(self, tensor: Tensor) -> Any:
        if not self._is_activation(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        known = self._packed.get(key)
        if known is not None and known[0]() is not None:
            return known[1]
        packed = Compressed(tensor, self._bits) if self._bits else _Moved(tensor)
        self._packed[key] = (weakref.ref(storage), packed)
        return packed


class _Moved:
    """A tensor in host memory, pinned where it came from a GPU."""

    __slots__ = ("_bring_back",)

    def __init__(self, tensor: Tensor) -> None:
        mover = _MOVER.get()
        self._bring_back = (mover or _to_host)(tensor.detach())

    def restore(self) -> Tensor:
        """Return the tensor on its device."""
        return self._bring_back()


def _to_host(tensor: Tensor) -> Callable[[], Tensor]:
    device = tensor.device
    host = torch.empty_like(tensor, device="cpu", pin_memory=device.type == "cuda")
    host.copy_(tensor)
    return lambda: host.to(device, non_blocking=True)


def _unpack(packed: Any) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.restore()
