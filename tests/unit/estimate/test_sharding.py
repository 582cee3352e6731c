"""Layouts: what a rank holds, what it sends, how long a step takes, and which one to take."""

from __future__ import annotations

import dataclasses

import pytest

from workbench.errors import EstimateError, RecipeError
from workbench.estimate import clear_caches, estimate_layouts, estimate_run
from workbench.estimate import run as run_module
from workbench.estimate.layout import CUTS, Layout
from workbench.estimate.network import Group, Network, collective_seconds, network_of, sent_bytes
from workbench.estimate.sharding import NCCL_GROUP_BYTES, NCCL_PAIR_BYTES, list_layouts, nccl_bytes
from workbench.estimate.traffic import groups_of
from workbench.hardware import find_device
from workbench.recipe import Recipe

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
A100 = find_device("A100-SXM4-80GB")


def recipe_of(**changes: object) -> Recipe:
    settings = {
        "model.config": CONFIG,
        "adapter.method": "none",
        "data.max_length": 256,
        "training.per_device_train_batch_size": 1,
        "training.gradient_accumulation_steps": 4,
        "training.mixed_precision": "no",
        "evaluation.split": "none",
    }
    return Recipe().with_changes(settings | {name.replace("__", "."): value for name, value in changes.items()})


def row_of(layout: Layout, **changes: object):
    table = estimate_layouts(recipe_of(**changes), A100, num_devices=layout.num_devices, layouts=[layout])
    return table.rows[0]


@pytest.fixture(scope="module")
def alone():
    return estimate_run(recipe_of(), A100)


# -- wires -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ranks", "share"),
    [("all_reduce", 8, 1.75), ("all_gather", 8, 0.875), ("reduce_scatter", 2, 0.5), ("all_reduce", 1, 0)],
)
def test_a_ring_sends_what_nccl_tests_count(kind: str, ranks: int, share: float) -> None:
    assert sent_bytes(kind, 1000, Group(ranks)) == 1000 * share


def test_a_large_collective_takes_its_bytes_over_the_slowest_wire() -> None:
    network = Network("x", 8, device_bytes_per_s=100e9, machine_bytes_per_s=10e9, efficiency=1.0)
    inside = collective_seconds("all_gather", 80e9, Group(8), network)
    assert inside == pytest.approx(0.7, rel=1e-3)
    across = collective_seconds("all_gather", 80e9, Group(16, machines=2), network)
    assert across == pytest.approx(7.5, rel=1e-3)
    shared = collective_seconds("all_gather", 80e9, Group(16, machines=2, sharing=4), network)
    assert shared == pytest.approx(4 * across, rel=1e-3)


def test_small_collectives_wait_for_hops_and_a_tree_for_fewer() -> None:
    network = Network("x", 8, 1e15, 1e15)
    few, many = (collective_seconds("all_gather", 8, Group(size, size // 8), network) for size in (8, 1024))
    assert many > 20 * few
    assert collective_seconds("all_reduce", 8, Group(1024, 128), network) < many / 4


def test_networks_have_their_names_and_rates() -> None:
    two = recipe_of(sharding__num_processes=16, sharding__num_machines=2, sharding__machine_network="25gbit")
    network = network_of(two, A100)
    assert network.name == "NVLink, 25 Gbit/s between machines" and network.devices_per_machine == 8
    assert network.machine_bytes_per_s == 25e9 / 8 and network.device_bytes_per_s == 300e9
    slow = network_of(recipe_of(sharding__network="pcie"), A100)
    assert slow.name == "PCIe" and slow.device_bytes_per_s == 32e9
    assert network_of(recipe_of(), find_device("Tesla T4")).name == "PCIe"


def test_ranks_that_split_products_are_neighbours_and_copies_share_the_wire() -> None:
    groups = groups_of(Layout("fsdp", 4, tensor_parallel=4, shard_size=4), devices_per_machine=8)
    assert groups.tensor == Group(4) and groups.data == Group(4, machines=2, sharing=4)
    hybrid = groups_of(Layout("hybrid", 16, shard_size=8), devices_per_machine=8)
    assert hybrid.shard == Group(8) and hybrid.replicate == Group(2, machines=2, sharing=8)


def at_rest(row) -> int:
    """Return the bytes between steps without cuBLAS's workspaces."""
    return row.memory.rest_bytes - row.memory.breakdown["workspace"]


# -- memory ------------------------------------------------------------------------------------------------------------


def test_at_rest_a_rank_holds_its_share_of_what_is_cut(alone) -> None:
    weights = 4 * alone.num_parameters
    for kind, left in (("zero3", 1 / 4), ("fsdp", 1 / 4)):
        row = row_of(Layout(kind, 4, shard_size=4))
        # Weights and two moments; DeepSpeed has one more copy of the weights.
        held = (3 + (kind == "zero3")) * weights * left
        assert at_rest(row) == pytest.approx(held, rel=0.02), kind
    zero1 = row_of(Layout("zero1", 4, shard_size=4))
    assert at_rest(zero1) == pytest.approx(weights * (1 + 3 / 4), rel=0.02)


def test_ddp_keeps_a_second_copy_of_the_gradients(alone) -> None:
    row = row_of(Layout("ddp", 2))
    extra = row.memory.peak_allocated_bytes - alone.memory.peak_allocated_bytes
    assert extra == pytest.approx(4 * alone.num_parameters, rel=0.06)  # and a block's rounding each


def test_more_is_cut_from_layout_to_layout() -> None:
    peaks = [
        row_of(Layout(kind, 8, shard_size=8 if CUTS[kind] else 1)).memory.peak_allocated_bytes
        for kind in ("ddp", "zero1", "zero2", "fsdp")
    ]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0] / 2


@pytest.mark.parametrize("kind", ["ddp", "zero2", "fsdp"])
def test_a_cut_trace_unrolls_to_the_cut_trace_of_the_whole_model(kind: str, monkeypatch) -> None:
    layout = Layout(kind, 4, shard_size=1 if kind == "ddp" else 4)
    unrolled = row_of(layout).memory
    clear_caches()
    monkeypatch.setattr(run_module, "_period", lambda *args: 0)
    whole = row_of(layout).memory
    clear_caches()
    assert unrolled.peak_allocated_bytes == pytest.approx(whole.peak_allocated_bytes, rel=1e-3)
    assert unrolled.peak_reserved_bytes == pytest.approx(whole.peak_reserved_bytes, rel=0.02)


def test_half_the_heads_on_each_of_two_devices(alone) -> None:
    row = row_of(Layout("ddp", 1, tensor_parallel=2))
    embedding = 4 * 4000 * 512
    whole = 4 * alone.num_parameters
    assert row.memory.breakdown["parameter"] == pytest.approx((whole - embedding) / 2 + embedding, rel=0.01)
    state = row.memory.breakdown["optimizer_state"]
    assert state == pytest.approx(2 * ((whole - embedding) / 2 + embedding), rel=0.01)


def test_a_stage_holds_its_layers_and_the_first_one_more_micro_batches(alone) -> None:
    four = row_of(Layout("ddp", 1, pipeline_parallel=4))
    assert four.memory.breakdown["parameter"] < 4 * alone.num_parameters / 2
    few = row_of(Layout("ddp", 1, pipeline_parallel=4), training__gradient_accumulation_steps=1, data__max_length=2048)
    many = row_of(Layout("ddp", 1, pipeline_parallel=4), training__gradient_accumulation_steps=8, data__max_length=2048)
    assert few.accumulation == 4 and few.bubble_s / few.compute_s == pytest.approx(3 / 4, rel=0.1)
    assert many.bubble_s / many.compute_s == pytest.approx(3 / 32, rel=0.1)


def test_communicators_take_memory_of_their_own() -> None:
    assert nccl_bytes(Layout("ddp", 1)) == 0
    assert nccl_bytes(Layout("ddp", 2)) == NCCL_PAIR_BYTES
    assert nccl_bytes(Layout("hybrid", 16, shard_size=8)) == NCCL_GROUP_BYTES + NCCL_PAIR_BYTES


# -- traffic and time --------------------------------------------------------------------------------------------------


def test_layouts_send_what_the_papers_say(alone) -> None:
    gradients = 4 * alone.num_parameters
    rows = {kind: row_of(Layout(kind, 8, shard_size=1 if kind == "ddp" else 8)) for kind in ("ddp", "zero1", "fsdp")}
    assert rows["ddp"].sent_bytes["all_reduce"] == pytest.approx(1.75 * gradients, rel=1e-3)
    assert sum(rows["zero1"].sent_bytes.values()) == pytest.approx(1.75 * gradients, rel=1e-3)
    assert rows["fsdp"].accumulation == 4
    assert rows["fsdp"].sent_bytes["reduce_scatter"] == pytest.approx(4 * 0.875 * gradients, rel=1e-3)
    root = 4 * (2 * 4000 * 512 + 512)
    assert rows["fsdp"].sent_bytes["all_gather"] == pytest.approx(4 * 0.875 * (2 * gradients - root), rel=1e-3)
    tensor = row_of(Layout("ddp", 1, tensor_parallel=2))
    activations = 4 * 12 * tensor.accumulation * 256 * 512 * 4
    assert tensor.sent_bytes["all_reduce"] == pytest.approx(activations, rel=1e-3)


def test_overlap_hides_communication_under_computation_but_not_all_of_it() -> None:
    fast, slow = (row_of(Layout("fsdp", 8, shard_size=8), sharding__network=name) for name in ("nvlink", "pcie"))
    assert fast.step_s > fast.overlapped_s > fast.compute_s
    assert slow.communication_s > 5 * fast.communication_s and slow.overlapped_s > fast.overlapped_s
    assert slow.overlapped_s >= slow.communication_s - 1e-9


def test_all_layouts_see_the_same_samples_and_the_simplest_that_fits_is_best() -> None:
    table = estimate_layouts(recipe_of(), A100, num_devices=8)
    assert table.samples_per_step == 32
    for row in table.rows:
        if not row.refused:
            assert row.accumulation * row.layout.data_parallel == 32, row.layout.name
    assert table.best.layout.name == "DDP x8"
    small = dataclasses.replace(A100, capacity_bytes=round(table.best.memory.interval_bytes[0] * 0.98))
    assert estimate_layouts(recipe_of(), small, num_devices=8).best.layout.kind != "ddp"


def test_what_a_model_cannot_be_split_into_is_refused_with_the_reason() -> None:
    assert "num_key_value_heads is 4, which 8 devices" in row_of(Layout("ddp", 1, tensor_parallel=8)).refused
    assert "cannot be cut into 8 stages" in row_of(Layout("ddp", 1, pipeline_parallel=8)).refused
    quantized = {"quantization__load_in_4bit": True, "adapter__method": "lora"}
    assert "cannot cut weights in 4 bits" in row_of(Layout("fsdp", 8, shard_size=8), **quantized).refused


def test_layouts_divide_the_devices() -> None:
    for count, machine in ((1, 1), (6, 6), (16, 8), (1024, 8)):
        found = list_layouts(count, machine)
        assert found and all(layout.num_devices == count for layout in found)
        assert len({layout.name for layout in found}) == len(found)


def test_the_estimate_of_a_recipe_for_several_devices_is_that_of_a_rank(alone) -> None:
    spread = estimate_run(recipe_of(sharding__num_processes=4, sharding__layout="fsdp"), A100)
    assert spread.memory.rest_bytes < alone.memory.rest_bytes / 3
    assert spread.time.tokens_per_s > 2 * alone.time.tokens_per_s
    assert spread.time.seconds_by_class["communication"] > 0
    with pytest.raises(EstimateError, match="num_key_value_heads"):
        estimate_run(recipe_of(sharding__num_processes=8, sharding__tensor_parallel_size=8), A100)
    with pytest.raises(RecipeError, match="shared equally by 3 machines"):
        estimate_run(recipe_of(sharding__num_processes=4, sharding__num_machines=3), A100)
