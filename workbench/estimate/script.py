"""What a training script does otherwise than our own trainer, so that runs of other scripts can be estimated too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..recipe import Recipe

Forward = Callable[[Recipe, nn.Module, Mapping[str, Tensor]], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Script:
    """A training script seen from the estimator. ``Script()`` is our trainer.

    Attributes:
        name: Tells two scripts apart where traces are cached.
        forward: Computes ``(loss, outputs)`` from ``(recipe, model, batch)`` in place of ``compute_loss``.
        keeps_outputs: Whether the second value of ``forward`` stays referenced through backward and the optimizer
            step, as a variable of a plain loop does. Our trainer drops it when the loss is known.
        adapt: Changes the model after ``build_model``, on the meta device.
        around: A context the whole trace runs in, e.g. one that puts fused functions in place of a module's.
        warms_up: Whether the weights are loaded through a device map, for which transformers 5 takes one block of all
            weights first; ``model.cuda()`` and older versions take block after block.
        loads_ahead: Whether threads read all weights while the first ones are quantized, as transformers 5.0 does.
        empties_cache: Whether the preparation for training on packed weights ends with an empty cache (peft from 0.20).
        rotates_by_product: Whether the rotary embedding multiplies matrices, so that cuBLAS takes its workspace there:
            transformers before 5.20.
        sdpa_kernel: Pins ``scaled_dot_product_attention`` to ``"flash"``, ``"efficient"`` or ``"math"``.

    Example:
        >>> def forward(recipe, model, batch):
        ...     outputs = model(**batch)
        ...     return outputs.loss, outputs
        >>> loop = Script("my loop", forward, keeps_outputs=True)
    """

    name: str = ""
    forward: Forward | None = None
    keeps_outputs: bool = False
    adapt: Callable[[nn.Module], nn.Module] | None = None
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    sdpa_kernel: str | None = None
    warms_up: bool = True
    loads_ahead: bool = False
    empties_cache: bool = True
    rotates_by_product: bool = False


OUR_TRAINER = Script()
