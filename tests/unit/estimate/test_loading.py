"""How weights come onto the device: their order, what lies beside them, where cuBLAS's workspaces go."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workbench.estimate.allocator import CachingAllocator, OutOfCapacity
from workbench.estimate.assemble import Schedule, line_up
from workbench.estimate.loading import WHOLE, read_ahead
from workbench.estimate.memory import replay_schedule, smallest_capacity
from workbench.estimate.quantized import Card, runs_fused
from workbench.estimate.run import traced_run
from workbench.estimate.script import Script
from workbench.estimate.shape import full_shape
from workbench.hardware import find_device
from workbench.recipe import Recipe

MIB = 2**20
T4 = Card((7, 5), 40)


def _schedule(script: Script, *, in_4bit: bool = True) -> Schedule:
    recipe = Recipe.from_dict(
        {
            "model": {"name_or_path": "tiny-llama", "dtype": "float16"},
            "data": {"max_length": 32},
            "quantization": {"load_in_4bit": in_4bit},
            "evaluation": {"split": "none"},
        }
    )
    traced, _ = traced_run(recipe, find_device("Tesla T4"), full_shape(recipe), script, None, None)
    return line_up(traced.life, 1, script=script)


def _operators(schedule: Schedule) -> np.ndarray:
    tape = schedule.life.tape
    return np.array(tape.operator_names)[np.array(tape.operators)[schedule.life.sources[schedule.sources]]]


def _modules(schedule: Schedule, tokens: np.ndarray) -> list[str]:
    tape = schedule.life.tape
    sources = schedule.life.sources[schedule.sources[tokens]]
    return [tape.module_names[tape.modules[source]] for source in sources.tolist()]


def _load_births(schedule: Schedule) -> np.ndarray:
    load = schedule.stretches[0]
    events = schedule.events[load.begin : load.end]
    return events[events >= 0]


def test_a_device_map_loads_in_the_order_of_names_and_cuda_in_the_order_of_modules() -> None:
    def first_layer(script: Script) -> list[str]:
        schedule = _schedule(script, in_4bit=False)
        names = [name.replace(".base_layer", "") for name in _modules(schedule, _load_births(schedule))]
        return [name.split("layers.0.")[1] for name in names if "layers.0." in name]

    by_name = first_layer(Script())
    by_module = first_layer(Script("cuda()", warms_up=False))
    assert by_name == sorted(by_name)
    assert by_name[0] == "input_layernorm"
    assert by_module[0] == "self_attn.q_proj"
    assert sorted(by_module) == by_name


def test_a_packed_weight_and_its_scales_are_made_beside_the_whole_weight() -> None:
    schedule = _schedule(Script())
    load = schedule.stretches[0]
    events = schedule.events[load.begin : load.end].tolist()
    operators = _operators(schedule)
    wholes = [event for event in events if event >= 0 and operators[event] == WHOLE]
    assert wholes
    for whole in wholes:
        inside = events[events.index(whole) + 1 : events.index(~whole)]
        assert [operators[event] for event in inside[:2]] == ["quant_state", "parameter"]


def test_threads_read_ahead_while_the_first_weight_is_read() -> None:
    # A first weight of 8 MiB, then whole weights (1, 3, 5, 7) with their packed forms (2, 4, 6, 8).
    sizes = np.array([8 * MIB] + [MIB, MIB // 4] * 4)
    operators = np.array(["parameter"] + [WHOLE, "parameter"] * 4)
    one_by_one = [0, 1, 2, ~1, 3, 4, ~3, 5, 6, ~5, 7, 8, ~7]
    moved = read_ahead(np.array(one_by_one), sizes, operators).tolist()
    assert sorted(moved) == sorted(one_by_one)
    assert moved[:5] == [0, 1, 3, 5, 7]  # all of them are there before the first is packed
    assert [event for event in moved if event in (2, 4, 6, 8)] == [2, 4, 6, 8]  # packed in the order of the file


def test_reading_ahead_changes_what_is_reserved_and_not_what_is_kept() -> None:
    device = find_device("Tesla T4")
    results = []
    for ahead in (False, True):
        schedule = _schedule(Script(f"ahead={ahead}", loads_ahead=ahead, empties_cache=False))
        replay = replay_schedule(schedule, device, "2.10.0", False)
        end = schedule.stretches[0].end - 1
        results.append((int(replay.allocated[end]), int(replay.allocated[:end].max())))
    assert results[0][0] == results[1][0]
    assert results[0][1] < results[1][1]


def test_workspaces_come_with_the_first_products() -> None:
    schedule = _schedule(Script(), in_4bit=False)
    replay = replay_schedule(schedule, find_device("Tesla T4"), "2.10.0", False)
    signs = np.where(schedule.events >= 0, 1, -1)
    tokens = np.where(schedule.events >= 0, schedule.events, ~schedule.events)
    rounded = np.maximum(-(-schedule.sizes // 512) * 512, 512)
    beside = replay.allocated - np.cumsum(signs * rounded[tokens])
    jumps = np.flatnonzero(np.diff(beside) >= 8 * MIB) + 1
    operators = _operators(schedule)
    for jump in jumps:
        assert operators[tokens[jump - 1]].split(".")[-1] in ("mm", "bmm", "addmm")
    assert len(jumps) == 2


def test_of_two_holes_of_one_size_the_later_segments_is_taken() -> None:
    allocator = CachingAllocator(is_compiled=False)
    first, second = allocator.malloc(32 * MIB), allocator.malloc(32 * MIB)
    allocator.free(first)
    allocator.free(second)
    assert allocator.malloc(32 * MIB) == second


@pytest.mark.parametrize(
    ("rows", "shape", "dtype", "card", "fused"),
    [
        (2048, (2048, 2048), torch.float16, T4, False),  # more rows than any card runs fused
        (4, (2048, 2048), torch.float16, T4, True),
        (4, (2048, 2048), torch.float16, Card(), False),  # a CPU
        (1024, (2048, 2048), torch.float32, T4, False),
    ],
)
def test_4bit_products_unpack_as_bitsandbytes_does(
    rows: int, shape: tuple[int, int], dtype: torch.dtype, card: Card, fused: bool
) -> None:
    assert runs_fused(rows, shape, dtype, card) is fused


def test_the_smallest_capacity_survives_and_less_does_not() -> None:
    device = find_device("Tesla T4")
    schedule = _schedule(Script(), in_4bit=False)
    least = smallest_capacity(schedule, device, torch_version="2.10.0") - device.context_bytes
    free = replay_schedule(schedule, device, "2.10.0", False)
    assert free.allocated.max() <= least <= free.reserved.max()
    replay_schedule(schedule, device, "2.10.0", False, least)
    with pytest.raises(OutOfCapacity):
        replay_schedule(schedule, device, "2.10.0", False, least - 2 * MIB)
