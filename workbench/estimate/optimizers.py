"""Clipping and optimizer steps on meta gradients, by the code path the target device takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..components.optimizer import BITSANDBYTES_OPTIMIZERS, build_optimizer
from ..recipe import Recipe

if TYPE_CHECKING:
    from .recorder import StorageRecorder

# bitsandbytes keeps the state of larger tensors in memory that the driver moves between host and device.
# Source: get_state_buffer, bitsandbytes/optim/optimizer.py.
PAGED_FROM_ELEMENTS = 100_000
# Operator that updates a parameter with 8-bit moments, by bitsandbytes' name.
_UPDATE = "bitsandbytes.optimizer_update_8bit_blockwise"


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> Tensor | None:
    """Scale gradients down to ``max_norm`` as ``torch.nn.utils.clip_grad_norm_`` does and return their norm.

    0 leaves them alone.

    On CPU and CUDA torch takes its foreach path, which it refuses to take for meta tensors, so its operators are
    called here.

    Source:
        ``_get_total_norm``, ``_clip_grads_with_norm_``, torch/nn/utils/clip_grad.py.
    """
    if not max_norm or not parameters:
        return None
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    with torch.no_grad():
        total = _total_norm(list(by_dtype.values()))
        factor = max_norm / (total + 1e-6)
        clamped = torch.clamp(factor, max=1.0)
        for group in by_dtype.values():
            torch._foreach_mul_(group, clamped)
    return total


def _total_norm(groups: list[list[Tensor]]) -> Tensor:
    norms = [norm for group in groups for norm in torch._foreach_norm(group, 2.0)]
    return torch.linalg.vector_norm(torch.stack(norms), 2.0)


def new_optimizer(recipe: Recipe, model: nn.Module, *, on_cuda: bool) -> torch.optim.Optimizer:
    """Return the optimizer of the Recipe over meta parameters, inside a trace."""
    if recipe.training.optim in BITSANDBYTES_OPTIMIZERS:
        with without_modes():  # Its constructor computes its code tables from values.
            return build_optimizer(recipe, model, for_cuda=on_cuda)
    return build_optimizer(recipe, model, for_cuda=on_cuda)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Leave all modes of this thread for a moment, so that real tensors can be computed in the middle of a trace."""
    from torch.overrides import _pop_mode_temporarily

    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        yield


def step_optimizer(
    recipe: Recipe, optimizer: torch.optim.Optimizer, recorder: StorageRecorder, *, on_cuda: bool
) -> None:
    """Run one optimizer step; bitsandbytes makes its state by its own rules and updates it in place.

    Source:
        ``Optimizer2State.init_state`` and ``get_state_buffer``, bitsandbytes/optim/optimizer.py.
    """
    if recipe.training.optim not in BITSANDBYTES_OPTIMIZERS:
        optimizer.step()
        return
    bnb_optimizer: Any = optimizer
    pages = bnb_optimizer.is_paged and on_cuda
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is None or optimizer.state[parameter]:
                continue
            if pages and parameter.numel() >= PAGED_FROM_ELEMENTS:
                _init_paged(bnb_optimizer, parameter)
                continue
            bnb_optimizer.is_paged = False
            try:
                bnb_optimizer.init_state(group, parameter, group_index, index)
            finally:
                bnb_optimizer.is_paged = pages
        for parameter in group["params"]:
            if parameter.grad is not None:
                recorder.add_update(_UPDATE, [parameter, parameter.grad, *_state_tensors(optimizer, parameter)])


def _state_tensors(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    """Return the moments of a parameter, without the code tables that all share."""
    values = optimizer.state[parameter]
    return [values[name] for name in ("state1", "state2", "absmax1", "absmax2") if isinstance(values.get(name), Tensor)]


def _init_paged(optimizer: Any, parameter: nn.Parameter) -> None:
    """Make what a paged state keeps on the device: block scales and tables. The states themselves are on the host."""
    state = optimizer.state[parameter]
    state["step"] = 0
    blocks = -(-parameter.numel() // 256)
    for number, table in ((1, "dynamic"), (2, "udynamic")):
        optimizer.name2qmap[table] = optimizer.name2qmap[table].to(parameter.device)
        state[f"absmax{number}"] = torch.zeros((blocks,), dtype=torch.float32, device=parameter.device)


def paged_host_bytes(recipe: Recipe, trainable_elements: list[int]) -> int:
    """Return the bytes of paged optimizer state: 8 bits for each of two moments of large tensors."""
    if recipe.training.optim != "paged_adamw_8bit":
        return 0
    return sum(2 * count for count in trainable_elements if count >= PAGED_FROM_ELEMENTS)
