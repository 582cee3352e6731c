"""Several tasks at once: LoRA of the lower layers shared, one of its own for each task above, and gates for both.

Every row of a batch says which task it is of. In lower layers the shared update is multiplied by a learned gate of the
row's task and that layer; in upper layers a row gets its own task's update times its gate. A gate is a factor of a
linear update, so that each task becomes a plain LoRA adapter: its gates are folded into ``lora_B``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..recipe import Recipe
from .layers import decoder_layers
from .own_adapter import OwnAdapter, mark_adapter
from .task_data import TASK, task_sets

SHARED = "shared"
_LAYER = re.compile(r"\.(\d+)\.")


class TaskGates(nn.Module):
    """A factor for each layer and task, 1 at first; knows which task each row of the running batch is of."""

    def __init__(self, num_layers: int, num_tasks: int) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(num_layers, num_tasks))
        self.rows: Tensor | None = None

    def shared(self, layer: int, output: Tensor) -> Tensor:
        """Return the shared update of a layer, each row times its task's gate."""
        return output * self._by_row(self.factors[layer][self._rows(output)], output)

    def own(self, layer: int, task: int, output: Tensor) -> Tensor:
        """Return one task's update of a layer for its own rows, and zero for the others."""
        is_mine = (self._rows(output) == task).to(self.factors.dtype)
        return output * self._by_row(is_mine * self.factors[layer, task], output)

    def _rows(self, output: Tensor) -> Tensor:
        if self.rows is None or output.ndim != 3 or output.shape[0] != self.rows.shape[0]:
            raise ModelError(
                "Several tasks need batches that say each row's task, and layers that keep rows apart (no experts). "
                "Leave tasks.data empty for this model."
            )
        return self.rows

    def _by_row(self, factors: Tensor, output: Tensor) -> Tensor:
        return factors[:, None, None].to(output.dtype)


def num_shared_layers(recipe: Recipe, num_layers: int) -> int:
    """Return how many of the lower layers all tasks share; half of them where the Recipe leaves it open."""
    wanted = recipe.tasks.shared_layers
    return min(num_layers // 2 if wanted is None else wanted, num_layers - 1)


def attach_tasks(recipe: Recipe, model: Any, config: Any) -> nn.Module:
    """Return the model with one shared adapter, one of each task, and gates; all of them train.

    Args:
        recipe: ``tasks`` names the tasks.
        model: The base model.
        config: PEFT's LoraConfig without layers.

    Raises:
        ModelError: The model has no list of equal layers.
    """
    from peft import get_peft_model
    from peft.tuners.lora import LoraLayer

    tasks, num_layers = list(task_sets(recipe)), len(decoder_layers(model))
    border = num_shared_layers(recipe, num_layers)
    lower, upper = list(range(border)), list(range(border, num_layers))
    options: Any = {"autocast_adapter_dtype": recipe.adapter.autocast_adapter_dtype}
    is_meta = next(model.parameters()).device.type == "meta"
    with torch.device("meta") if is_meta else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        parts = {**({SHARED: lower} if lower else {}), **dict.fromkeys(tasks, upper)}
        wrapped: Any = None
        for name, layers in parts.items():
            one = copy.deepcopy(config)
            one.layers_to_transform = layers
            if wrapped is None:
                wrapped = get_peft_model(model, one, adapter_name=name, **options)
            else:
                wrapped.add_adapter(name, one, **options)
        gates = TaskGates(num_layers, len(tasks))
    wrapped.base_model.set_adapter(list(parts))
    wrapped.add_module("task_gates", gates.to(next(model.parameters()).device))
    for path, module in wrapped.named_modules():
        if isinstance(module, LoraLayer):
            layer = int(_LAYER.findall(path)[-1])
            for name, matrix in module.lora_B.items():
                task = None if name == SHARED else tasks.index(name)
                matrix.register_forward_hook(functools.partial(_gated, gates, layer, task))
    wrapped.register_forward_pre_hook(functools.partial(_take_rows, gates), with_kwargs=True)
    names = tuple(name for name, one in wrapped.named_parameters() if one.requires_grad)
    settings = {"tasks": tasks, "shared_layers": border}
    mark_adapter(wrapped, OwnAdapter("tasks", recipe.model.name_or_path, settings, names))
    return wrapped


def _gated(gates: TaskGates, layer: int, task: int | None, _: Any, __: Any, output: Tensor) -> Tensor:
    return gates.shared(layer, output) if task is None else gates.own(layer, task, output)


def _take_rows(gates: TaskGates, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    gates.rows = kwargs.pop(TASK, None)
    return args, kwargs


def save_tasks(model: Any, folder: Path) -> None:
    """Write each task as a plain PEFT adapter into a folder of its name, its gates folded into ``lora_B``."""
    from safetensors.torch import save_file

    tasks = [name for name in model.peft_config if name != SHARED]
    for index, task in enumerate(tasks):
        (folder / task).mkdir()
        save_file(task_tensors(model, task, index), folder / task / "adapter_model.safetensors")
        config = copy.deepcopy(model.peft_config[task])
        config.layers_to_transform, config.inference_mode = None, True
        config.base_model_name_or_path = config.base_model_name_or_path or model.get_base_model().name_or_path
        config.save_pretrained(str(folder / task))


def task_tensors(model: Any, task: str, index: int) -> dict[str, Tensor]:
    """Return one task's tensors under PEFT's names, as if it had been trained alone."""
    factors, tensors = model.task_gates.factors.detach(), {}
    for name, parameter in model.named_parameters():
        match = re.fullmatch(rf"(.*\.lora_([AB]))\.({re.escape(task)}|{SHARED})\.weight", name)
        if match is None:
            continue
        value = parameter.detach()
        if match.group(2) == "B":
            layer = int(_LAYER.findall(name)[-1])
            value = value * factors[layer, index].to(value.dtype)
        tensors[f"{match.group(1)}.weight"] = value.cpu().contiguous()
    return tensors


def load_tasks(model: Any, folder: Path, tasks: Sequence[str]) -> Any:
    """Return the base with every task's adapter; ``set_adapter(NAME)`` switches, the first one is active."""
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(model, str(folder / tasks[0]), adapter_name=tasks[0])
    for task in tasks[1:]:
        loaded.load_adapter(str(folder / task), adapter_name=task)
    loaded.set_adapter(tasks[0])
    return loaded
