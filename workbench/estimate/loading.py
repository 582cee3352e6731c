"""How a model comes onto the device: the order of its weights, what lies beside them for a moment, what stays cached.

All of it decides where the holes are that the first step finds, and so what is reserved beyond what is allocated.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..recipe import Recipe
from ..units import GIB
from .modules import kept_map
from .quantized import quant_parts
from .recorder import StorageRecorder
from .script import Script

# Name of the operator that bears a weight; the block that is taken to warm the allocator up is as large as these.
WEIGHT = "parameter"
# Name of the operator that bears a weight as the file has it, until it is packed.
WHOLE = "unpacked weight"
# Threads that read weights. Source: GLOBAL_WORKERS, transformers/core_model_loading.py.
READERS = 4
# Assumed: a thread reads 1 GiB/s, and packing one weight keeps the main thread for 1 ms. Chosen with 29 published runs
# on a T4 in view: with 0.5 to 2 ms their reserved bytes are 1.3 to 1.5 % off in the mean, with 0 ms 2.0 % and one 18 %.
READ_BYTES_PER_S = GIB
PACK_S = 1e-3


def is_adapter(module_name: str) -> bool:
    """Whether a module belongs to an adapter, which is attached after the base was loaded."""
    return any(
        part in module_name
        for part in (".lora_", ".modules_to_save", ".bottleneck.", ".trainable_tokens_", "task_gates")
    )


@dataclass(frozen=True)
class _Weight:
    """A parameter where it is first met.

    Attributes:
        name: Path of its module.
        field: Its name there.
        module: The module.
        parameter: The parameter, as it trains.
    """

    name: str
    field: str
    module: Any
    parameter: nn.Parameter


class Loader:
    """Records the segments ``load``, ``prepare`` and ``adapter`` of a trace.

    Args:
        recorder: Where to.
        model: From ``build_model(place="meta")``.
        recipe: The settings.
        dtype: Dtype the weights have in memory before anything is quantized or cast.
        script: Says how the weights are loaded.

    Source:
        ``convert_and_load_state_dict_in_model``, transformers/core_model_loading.py: weights come in the order of
        their names with numbers as numbers, and with quantization one after the other. ``model.cuda()`` goes through
        the modules instead.
    """

    def __init__(
        self, recorder: StorageRecorder, model: nn.Module, recipe: Recipe, dtype: torch.dtype, script: Script
    ) -> None:
        self._recorder, self._recipe, self._dtype, self._script = recorder, recipe, dtype, script
        self._known = kept_map(model)
        self._casts: dict[int, int] = {}

    def record(self) -> None:
        """Record all three segments."""
        recorder = self._recorder
        weights, adapters = self._collect()
        recorder.begin_segment("load", "load")
        ordered = sorted(weights, key=_file_order) if self._script.warms_up else weights
        for weight in ordered:
            self._load(weight)
        for name, module in zip(self._known.names, self._known.modules, strict=True):
            for buffer in module._buffers.values():
                if buffer is not None and buffer.is_meta:
                    recorder.add_tensor(buffer, "buffer", name)
        recorder.begin_segment("prepare", "load")
        for weight in weights:
            token = self._casts.get(id(weight.parameter))
            if token is not None:
                recorder.add_tensor(weight.parameter, WEIGHT, weight.name)
                recorder.end_bytes(token)
        recorder.begin_segment("adapter", "load")
        for weight in adapters:
            recorder.add_tensor(weight.parameter, WEIGHT, weight.name)

    def _collect(self) -> tuple[list[_Weight], list[_Weight]]:
        """Return the weights of the base and of the adapter in the order of the modules, shared ones once."""
        weights: list[_Weight] = []
        adapters: list[_Weight] = []
        seen: set[int] = set()
        for name, module in zip(self._known.names, self._known.modules, strict=True):
            for field, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    (adapters if is_adapter(name) else weights).append(_Weight(name, field, module, parameter))
        return weights, adapters

    def _load(self, weight: _Weight) -> None:
        if _is_packed(weight.parameter):
            self._quantize(weight, self._recorder.add_bytes(self._whole_bytes(weight), WHOLE, weight.name))
        elif self._is_cast(weight.parameter):
            num_bytes = weight.parameter.numel() * self._dtype.itemsize
            self._casts[id(weight.parameter)] = self._recorder.add_bytes(num_bytes, WEIGHT, weight.name)
        else:
            self._recorder.add_tensor(weight.parameter, WEIGHT, weight.name)

    def _whole_bytes(self, weight: _Weight) -> int:
        return int(weight.module.in_features * weight.module.out_features * self._dtype.itemsize)

    def _quantize(self, weight: _Weight, whole: int) -> None:
        """Record the packed weight, its scales and what quantizing takes meanwhile, then end the whole weight.

        Source:
            The kernels ``quantize_4bit``, ``quantize_blockwise`` and ``int8_vectorwise_quant``,
            bitsandbytes/backends/cuda/ops.py; ``Params4bit`` and ``Int8Params``, bitsandbytes/nn/modules.py.
        """
        recorder, name = self._recorder, weight.name
        scales = quant_parts(weight.parameter, weight.module)
        state = getattr(weight.parameter, "quant_state", None)
        halves = None
        if state is None:  # int8 is packed from a float16 copy
            halves = recorder.add_bytes(2 * weight.parameter.numel(), WHOLE, name)
        unscaled = []
        if state is not None and state.nested:
            unscaled.append(recorder.add_bytes(4 * state.absmax.numel(), "unpacked scales", name))
        elif scales:
            recorder.add_tensor(scales[0], "quant_state", name)
        recorder.add_tensor(weight.parameter, WEIGHT, name)
        if state is not None and state.nested:
            recorder.add_tensor(state.code, "quant_state", name)
            recorder.add_tensor(state.offset, "quant_state", name)
            unscaled.append(recorder.add_bytes(4 * state.absmax.numel(), "unpacked scales", name))
        for part in scales:
            recorder.add_tensor(part, "quant_state", name)
        for token in (*reversed(unscaled), *(() if halves is None else (halves,)), whole):
            recorder.end_bytes(token)

    def _is_cast(self, parameter: Tensor) -> bool:
        """Whether the float32 preparation made this parameter from a 16-bit one."""
        quantization = self._recipe.quantization
        return (
            bool(quantization.bits)
            and quantization.prepare_model_for_kbit_training
            and parameter.dtype == torch.float32
            and self._dtype != torch.float32
        )


def _is_packed(parameter: Tensor) -> bool:
    return not parameter.dtype.is_floating_point


def _file_order(weight: _Weight) -> list[tuple[int, int, str]]:
    """Return the place of a weight among names sorted with numbers as numbers; source: ``dot_natural_key``, ibid."""
    path = f"{weight.name}.{weight.field}".replace(".base_layer", "")
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.split(".")]


def read_ahead(events: Any, sizes: Any, operators: Any) -> Any:
    """Return the events of a load whose weights threads read while the main thread packs them one after the other.

    The first weight is the embedding, the largest: while one thread reads it the others read on, and what they have
    read waits unpacked until the embedding is in its place.

    Args:
        events: Tokens and ``~token`` of a load that takes one weight after the other.
        sizes: Bytes by token.
        operators: Name of the operator by token.

    Source:
        ``convert_and_load_state_dict_in_model``, transformers/core_model_loading.py 5.0; later versions read one
        weight after the other where they quantize.
    """
    units = _units(events.tolist(), operators)
    free = [0.0] * READERS
    timed: list[tuple[float, int, int, list[int]]] = []
    packed_s = 0.0
    for index, unit in enumerate(units):
        start = heapq.heappop(free)
        end = start + float(sizes[unit[0]]) / READ_BYTES_PER_S
        heapq.heappush(free, end)
        timed.append((start, 0, index, unit[:1]))
        packed_s = max(packed_s, end) + (PACK_S if len(unit) > 1 else 0.0)
        timed.append((packed_s, 1, index, unit[1:]))
    ordered = [event for *_, part in sorted(timed) for event in part]
    return np.array(ordered, dtype=np.int64)


def _units(events: list[int], operators: Any) -> list[list[int]]:
    """Return the events of each weight: a birth, or a whole weight's birth to its death."""
    units: list[list[int]] = []
    whole = None
    for event in events:
        if whole is not None:
            units[-1].append(event)
            whole = None if event == ~whole else whole
        else:
            units.append([event])
            whole = event if event >= 0 and operators[event] == WHOLE else None
    return units
