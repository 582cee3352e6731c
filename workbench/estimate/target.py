"""Make meta tensors behave in Python like tensors of the target device: its name, its kernels, its autocast.

All of it lives in function modes, which belong to the thread that entered them: a training run in another thread of
the process notices nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..components.precision import Precision
from ..hardware import Device
from . import attention, data_shapes
from .fused import Note
from .packages import replaced_here

Handler = Callable[["TargetMode", Any, tuple[Any, ...], dict[str, Any]], Any]

# Operators that autocast runs in its lower precision, by device.
# Source: aten/src/ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP.
_LOWER_ALL = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "matmul", "mm", "mv",
    "bmm", "addmm", "addmv", "addbmm", "baddbmm", "chain_matmul", "linalg_multi_dot", "linalg_vecdot", "einsum",
    "prelu",
)  # fmt: skip
# ... and those it runs in float32: AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE for CUDA.
_FLOAT32_CUDA = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow", "softplus", "layer_norm", "group_norm", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "cdist", "dist", "pdist", "renorm", "logsumexp", "prod", "softmax",
    "log_softmax", "cumprod", "cumsum", "sum", "norm", "rms_norm", "binary_cross_entropy_with_logits",
)  # fmt: skip
# Source: AutocastCPU registrations at the end of aten/src/ATen/autocast_mode.cpp.
_FLOAT32_CPU = (
    "binary_cross_entropy", "grid_sampler", "polar", "prod", "quantile", "nanquantile", "cdist", "trace",
    "cholesky_inverse", "mse_loss", "cosine_embedding_loss", "nll_loss", "hinge_embedding_loss", "poisson_nll_loss",
    "smooth_l1_loss", "l1_loss", "huber_loss", "margin_ranking_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "ctc_loss", "kl_div", "multilabel_margin_loss", "binary_cross_entropy_with_logits",
    "cross_entropy",
)  # fmt: skip
# Operators that autocast runs in the widest dtype of their arguments: AT_FORALL_PROMOTE, and those of the CPU.
_PROMOTED = {
    "cuda": (
        "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
        "scatter_add",
    ),
    "cpu": ("stack", "cat", "index_copy"),
}  # fmt: skip
_CASTS_PER_MODE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _functions(names: tuple[str, ...]) -> frozenset[Any]:
    found = set()
    for name in names:
        for home in (torch, functional, Tensor):
            function = getattr(home, name, None)
            if function is not None:
                found.add(function)
    return frozenset(found)


@functools.cache
def _lower() -> frozenset[Any]:
    extra = {Tensor.__matmul__, Tensor.__rmatmul__, functional.linear, torch._C._nn.linear}
    return _functions(_LOWER_ALL) | extra


@functools.cache
def _upper(kind: str) -> frozenset[Any]:
    extra = {Tensor.__pow__, Tensor.__rpow__} if kind == "cuda" else set()
    return _functions(_FLOAT32_CUDA if kind == "cuda" else _FLOAT32_CPU) | extra


@functools.cache
def _promoted(kind: str) -> frozenset[Any]:
    return _functions(_PROMOTED[kind])


class TargetMode(TorchFunctionMode):
    """Function mode that stands in for the target device while a meta model runs.

    Args:
        device: The target.
        sdpa_kernel: Pins the kernel of ``scaled_dot_product_attention``; None lets the device's rules choose.
    """

    def __init__(self, device: Device, sdpa_kernel: str | None = None) -> None:
        super().__init__()
        self.sdpa_kernel = sdpa_kernel
        self.kind = "cuda" if device.has_caching_allocator else "cpu"
        self.torch_device = torch.device(self.kind, 0) if self.kind == "cuda" else torch.device("cpu")
        # A card without a compute capability (ROCm) has a flash kernel with the same rules.
        self.capability = device.compute_capability or (9, 0)
        self.on_backward: Callable[[], None] | None = None
        self.on_new_tensor: Callable[[Tensor, str], None] = lambda *_: None
        self.on_attention: Note = lambda *_: None
        self.cast_cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._lower = _lower()
        self._upper = _upper(self.kind)
        self._promoted = _promoted(self.kind)
        self._handlers = _handlers()
        self._makers = _factories()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs)
        if "device" in kwargs or func in self._makers:
            kwargs = self._place(func, kwargs)
        if not torch.is_autocast_enabled(self.kind):
            return func(*args, **kwargs)
        args, kwargs = self._cast(func, args, kwargs)
        # C++ ends its temporaries from the last made to the first; a list drops its items from the end.
        casts = list(reversed(args))
        result = func(*args, **kwargs)
        del args, kwargs
        casts.clear()
        return result

    def _place(self, func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == self.kind:
            return {**kwargs, "device": "meta"}
        if asked is None and func in self._makers and self.kind == "cpu":
            return {**kwargs, "device": "meta"}
        return kwargs

    def _cast(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if func in self._lower:
            dtype = torch.get_autocast_dtype(self.kind)
        elif func in self._upper:
            dtype = torch.float32
            if "dtype" in kwargs and kwargs["dtype"] is not None:
                return args, kwargs
        elif func in self._promoted:
            dtype = _widest([*args, *kwargs.values()])
        else:
            return args, kwargs
        cast = functools.partial(self._cast_one, dtype=dtype)
        # GCC evaluates the arguments of autocast's wrapper from the last to the first, so the bias is cast first.
        kwargs = {name: _map(cast, value) for name, value in kwargs.items()}
        return tuple(_map(cast, value) for value in reversed(args))[::-1], kwargs

    def _cast_one(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or value.dtype == dtype or value.dtype not in _CASTS_PER_MODE:
            return value
        if not value.is_meta or value.dtype == torch.float64:
            return value
        # Trainable float32 weights are cast once a forward pass; frozen ones at every use.
        # Source: cached_cast, aten/src/ATen/autocast_mode.cpp.
        keeps = (
            value.dtype == torch.float32
            and dtype != torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not keeps:
            return value.to(dtype)
        found = self.cast_cache.get(id(value))
        if found is None:
            found = self.cast_cache[id(value)] = (value, value.to(dtype))
        return found[1]

    @contextlib.contextmanager
    def autocast(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Enter autocast as the target device would; None leaves it off.

        ``torch.autocast("cuda")`` refuses to work where torch sees no CUDA device, so its switches are set directly.
        They are thread-local. The nesting counter stays above 0, so that no inner context clears the process-wide
        cache of casts, which a training run in another thread may be using.
        """
        if dtype is None:
            yield
            return
        before = (torch.is_autocast_enabled(self.kind), torch.get_autocast_dtype(self.kind))
        torch.autocast_increment_nesting()
        torch.set_autocast_enabled(self.kind, True)
        torch.set_autocast_dtype(self.kind, dtype)
        try:
            yield
        finally:
            torch.set_autocast_enabled(self.kind, before[0])
            torch.set_autocast_dtype(self.kind, before[1])
            torch.autocast_decrement_nesting()
            if not before[0]:
                self.cast_cache.clear()


@contextlib.contextmanager
def answers_of(mode: TargetMode) -> Iterator[None]:
    """Let ``torch.cuda.get_device_capability`` answer for the target in this thread; other threads see no change.

    Model code asks it to choose a kernel, and no function mode sees the question.
    """
    if mode.kind != "cuda":
        yield
        return
    with replaced_here(torch.cuda, "get_device_capability", lambda device=None: mode.capability):
        yield


class TargetPrecision(Precision):
    """A Precision whose autocast is that of the target device, on meta tensors."""

    __slots__ = ("mode",)
    mode: TargetMode

    @classmethod
    def of(cls, precision: Precision, mode: TargetMode) -> TargetPrecision:
        """Return ``precision`` bound to a mode."""
        made = cls(precision.autocast_dtype, precision.uses_grad_scaler, precision.weight_dtype)
        object.__setattr__(made, "mode", mode)
        return made

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """Return the context the forward pass runs in."""
        return self.mode.autocast(self.autocast_dtype)


def _widest(values: Any) -> torch.dtype:
    """Return float32 where any tensor among the arguments has it, else the 16-bit dtype they share."""
    if isinstance(values, Tensor):
        return values.dtype if values.dtype in _CASTS_PER_MODE else torch.bfloat16
    found = [_widest(value) for value in values] if isinstance(values, (list, tuple)) else []
    return max(found, key=lambda dtype: dtype.itemsize, default=torch.bfloat16)


def _map(cast: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_map(cast, item) for item in value) if type(value) in (list, tuple) else value
    return cast(value)


def _get_device(mode: TargetMode, func: Any, args: Any, kwargs: Any) -> Any:
    device = func(*args, **kwargs)
    return mode.torch_device if device.type == "meta" else device


def _get_is_cuda(mode: TargetMode, func: Any, args: Any, kwargs: Any) -> bool:
    return mode.kind == "cuda" and args[0].is_meta


def _get_is_cpu(mode: TargetMode, func: Any, args: Any, kwargs: Any) -> bool:
    return mode.kind == "cpu" or not args[0].is_meta


def _move(mode: TargetMode, func: Any, args: Any, kwargs: Any) -> Any:
    if mode.kind == "cpu" and not args[0].is_meta:
        return func(*args, **kwargs)  # A real tensor that is already where it is wanted.

    def place(value: Any) -> Any:
        is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] == mode.kind)
        return torch.device("meta") if is_device and torch.device(value).type == mode.kind else value

    return func(
        args[0], *(place(value) for value in args[1:]), **{name: place(value) for name, value in kwargs.items()}
    )


def _new_tensor(mode: TargetMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.tensor`` on meta calls no operator; on a real device it shows as ``lift_fresh``."""
    result = func(*args, **mode._place(func, kwargs))
    if result.is_meta:
        mode.on_new_tensor(result, "aten.lift_fresh")
    return result


def _to_list(mode: TargetMode, func: Any, args: Any, kwargs: Any) -> Any:
    if args[0].is_meta and args[0].ndim == 1 and not args[0].dtype.is_floating_point:
        return data_shapes.ExpectedSizes([1] * args[0].shape[0])
    return func(*args, **kwargs)


def _split(mode: TargetMode, func: Any, args: Any, kwargs: Any) -> Any:
    bound = dict(zip(("tensor", "sizes", "dim"), args, strict=False), **kwargs)
    sizes = bound.get("sizes", kwargs.get("split_size_or_sections", kwargs.get("split_size")))
    if isinstance(sizes, data_shapes.ExpectedSizes):
        tensor, dim = bound["tensor"], bound.get("dim", 0)
        return torch.split(tensor, sizes.shares_of(tensor.shape[dim]), dim)
    return func(*args, **kwargs)


def _stay(mode: TargetMode, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


def _backward(mode: TargetMode, func: Any, args: Any, kwargs: Any) -> None:
    if mode.on_backward is not None:
        mode.on_backward()
    # The autograd engine leaves function modes behind; what is computed again in backward enters this one by itself.
    torch.autograd.backward(args[0], kwargs.pop("gradient", None), **kwargs)


def _dropout(mode: TargetMode, func: Any, args: Any, kwargs: Any) -> Any:
    bound = dict(zip(("input", "p", "training", "inplace"), args, strict=False), **kwargs)
    value, p = bound["input"], bound.get("p", 0.5)
    training = bound.get("training", bound.get("train", True))
    if mode.kind == "cuda" and training and 0.0 < p < 1.0 and value.is_meta:
        return torch.native_dropout(value, p, True)[0]  # The CUDA kernel: one byte of mask for each element.
    return func(*args, **kwargs)


def _softmax(mode: TargetMode, func: Any, args: Any, kwargs: Any) -> Any:
    """float16 in, float32 out is one CUDA kernel without a float32 copy of its input.

    Source:
        ``softmax`` and ``log_softmax``, aten/src/ATen/native/SoftMax.cpp; bfloat16 has no such path.
    """
    bound = dict(zip(("input", "dim", "_stacklevel", "dtype"), args, strict=False), **kwargs)
    value, dtype, dim = bound.get("input", args[0] if args else None), bound.get("dtype"), bound.get("dim")
    if isinstance(bound.get("_stacklevel"), torch.dtype):  # torch.softmax(input, dim, dtype)
        dtype = bound["_stacklevel"]
    if torch.is_autocast_enabled(mode.kind) and dtype is None:
        dtype = torch.float32
    fused = mode.kind == "cuda" and dtype == torch.float32 and isinstance(dim, int)
    if fused and isinstance(value, Tensor) and value.is_meta and value.dtype == torch.float16:
        is_log = "log" in func.__name__
        return (torch.ops.aten._log_softmax if is_log else torch.ops.aten._softmax)(value, dim, True)
    if torch.is_autocast_enabled(mode.kind):
        args, kwargs = mode._cast(func, args, kwargs)
    return func(*args, **kwargs)


def _attend(mode: TargetMode, func: Any, args: Any, kwargs: Any) -> Any:
    if torch.is_autocast_enabled(mode.kind):
        cast = functools.partial(mode._cast_one, dtype=torch.get_autocast_dtype(mode.kind))
        kwargs = {name: cast(value) for name, value in kwargs.items()}
        args = tuple(cast(value) for value in reversed(args))[::-1]
    if mode.kind == "cuda":
        return attention.attend_cuda(
            *args, **kwargs, capability=mode.capability, note=mode.on_attention, kernel=mode.sdpa_kernel
        )
    return attention.attend_cpu(*args, **kwargs)


@functools.cache
def _handlers() -> dict[Any, Handler]:
    getter: Any = Tensor.device
    return {
        getter.__get__: _get_device,
        Tensor.is_cuda.__get__: _get_is_cuda,  # type: ignore[attr-defined]  # a getset descriptor at run time
        Tensor.is_cpu.__get__: _get_is_cpu,  # type: ignore[attr-defined]  # a getset descriptor at run time
        Tensor.to: _move,
        torch.tensor: _new_tensor,
        Tensor.tolist: _to_list,
        **dict.fromkeys((Tensor.split, torch.split), _split),
        Tensor.cuda: _stay,
        Tensor.cpu: _stay,
        Tensor.backward: _backward,
        functional.dropout: _dropout,
        **dict.fromkeys((functional.softmax, torch.softmax, Tensor.softmax), _softmax),
        **dict.fromkeys((functional.log_softmax, torch.log_softmax, Tensor.log_softmax), _softmax),
        torch.dropout: _dropout,
        functional.scaled_dot_product_attention: _attend,
    }


@functools.cache
def _factories() -> frozenset[Any]:
    from torch.utils._device import _device_constructors

    return frozenset(_device_constructors())
