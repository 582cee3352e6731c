"""Which dtypes a run computes and stores in. Decided once, for the estimate and for the real run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..hardware import Device
from ..recipe import Recipe

if TYPE_CHECKING:
    from .source import ModelSource

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a run.

    Attributes:
        autocast_dtype: Dtype of matrix products under autocast; None computes in the dtype of the weights.
        uses_grad_scaler: Whether the loss is scaled before backward (float16 gradients would vanish without it).
        weight_dtype: Dtype the weights are loaded in; None keeps the checkpoint's, see ``load_weight_dtype``.
    """

    autocast_dtype: torch.dtype | None = None
    uses_grad_scaler: bool = False
    weight_dtype: torch.dtype | None = None

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """Return the context the forward pass runs in.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``: where the tensors are (fake ones are on ``"cpu"``).
        """
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=self.autocast_dtype)


def resolve_precision(recipe: Recipe, device: Device) -> Precision:
    """Return the dtypes a run of ``recipe`` uses on ``device``.

    ``mixed_precision: auto`` is bf16 where a GPU computes it natively, fp16 with loss scaling on an older GPU, and none
    on a CPU, where most machines emulate 16-bit products many times slower than float32.
    """
    wanted = recipe.training.mixed_precision
    if wanted == "auto":
        wanted = ("bf16" if device.bf16_native else "fp16") if device.has_caching_allocator else "no"
    autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": None}[wanted]
    return Precision(
        autocast_dtype=autocast_dtype,
        uses_grad_scaler=wanted == "fp16",
        weight_dtype=_weight_dtype(recipe, device),
    )


def load_weight_dtype(recipe: Recipe, source: ModelSource, device: Device) -> torch.dtype:
    """Return the dtype the weights (those that are not quantized) are loaded in.

    ``model.dtype: auto`` keeps the checkpoint's own dtype, with two exceptions, each because the run would otherwise
    be wrong or very slow:

    * Full fine-tuning loads float32. In 16 bits an AdamW update of a usual learning rate is smaller than half the
      distance to the next number and is rounded away: the run reports a loss and learns nothing.
    * Where the device does not compute bfloat16 natively, a frozen 16-bit base is loaded in what the device is fast
      in: float16 on a GPU, float32 on a CPU.
    """
    chosen = _weight_dtype(recipe, device)
    if chosen is not None:
        return chosen
    stored: torch.dtype | str = getattr(source.config, "dtype", None) or torch.float32
    checkpoint_dtype = getattr(torch, stored) if isinstance(stored, str) else stored
    if checkpoint_dtype == torch.bfloat16 and not device.bf16_native:
        return torch.float16 if device.has_caching_allocator else torch.float32
    if checkpoint_dtype == torch.float16 and not device.has_caching_allocator:
        return torch.float32
    return checkpoint_dtype


def _weight_dtype(recipe: Recipe, device: Device) -> torch.dtype | None:
    if recipe.model.dtype != "auto":
        return _DTYPES[recipe.model.dtype]
    return torch.float32 if recipe.adapter.method == "none" else None
