"""estimate_run on the smallest model: what moves it, what it leaves alone."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from workbench.errors import Cancelled, EstimateError, RecipeError
from workbench.estimate import clear_caches, estimate_run, run
from workbench.estimate.unroll import unroll
from workbench.events import MEMORY_CATEGORIES, Cancel
from workbench.hardware import Device, find_device
from workbench.recipe import Recipe

T4 = find_device("Tesla T4")
CPU = Device(
    name="CPU", kind="cpu", capacity_bytes=2**34, flops_per_s={"float32": 1e11}, bandwidth_bytes_per_s=1e10,
    launch_s=5e-6,
)  # fmt: skip
TINY = Recipe().with_changes({"model.name_or_path": "tiny-llama", "data.max_length": 64})


def _bytes(recipe: Recipe, device: Device = T4) -> int:
    return estimate_run(recipe, device).memory.peak_allocated_bytes


def test_the_breakdown_adds_up_and_the_timeline_reaches_the_peak() -> None:
    memory = estimate_run(TINY, T4).memory
    assert sum(memory.breakdown.values()) == memory.process_bytes
    assert set(memory.breakdown) <= set(MEMORY_CATEGORIES)
    assert memory.interval_bytes[0] <= memory.process_bytes <= memory.interval_bytes[1]
    series = memory.timeline.bytes_by_category
    lengths = {len(values) for values in series.values()}
    assert lengths == {len(memory.timeline.reserved_bytes)}
    at_peak = sum(values[memory.timeline.peak_index] for values in series.values())
    totals = [sum(column) for column in zip(*series.values(), strict=True)]
    assert at_peak >= 0.99 * max(totals)
    assert [name for _, name in memory.timeline.phases][:3] == ["load", "forward", "backward"]


def test_held_bytes_belong_to_modules() -> None:
    holders = estimate_run(TINY, T4).memory.holders
    assert holders == sorted(holders, key=lambda holder: -holder.num_bytes)
    weights = [holder for holder in holders if holder.category == "parameter" and "layers.*" in holder.module]
    assert weights
    assert any(holder.operator.startswith("aten.") for holder in holders)


@pytest.mark.parametrize(
    ("change", "less"),
    [
        ({"training.gradient_checkpointing": True}, True),
        ({"training.per_device_train_batch_size": 4}, False),
        ({"data.max_length": 128}, False),
        ({"adapter.method": "none"}, False),
        ({"adapter.lora_dropout": 0.1}, False),
        ({"training.mixed_precision": "no"}, False),
        ({"adapter.r": 64}, False),
    ],
)
def test_toggles_move_the_peak(change: dict[str, object], less: bool) -> None:
    # Without evaluation, whose batch is larger; a long sequence, so that activations count.
    base = TINY.with_changes({"evaluation.split": "none", "data.max_length": 96})
    changed = base.with_changes(change)
    assert (_bytes(changed) < _bytes(base)) is less


def test_a_full_card_does_not_fit_and_a_large_one_does() -> None:
    small = dataclasses.replace(T4, capacity_bytes=T4.context_bytes + 2**20)
    assert estimate_run(TINY, small).memory.verdict == "does_not_fit"
    estimate = estimate_run(TINY, T4)
    assert estimate.memory.fits
    barely = dataclasses.replace(T4, capacity_bytes=estimate.memory.process_bytes + 2**20)
    assert estimate_run(TINY, barely).memory.verdict == "tight"


def test_on_a_cpu_reserved_is_allocated() -> None:
    memory = estimate_run(TINY, CPU).memory
    assert memory.peak_reserved_bytes == memory.peak_allocated_bytes
    assert "workspace" not in memory.breakdown


def test_parameters_are_counted_unpacked_and_adapters_included() -> None:
    plain = estimate_run(TINY, T4)
    assert 0 < plain.num_trainable_parameters < plain.num_parameters
    full = estimate_run(TINY.with_changes({"adapter.method": "none"}), T4)
    assert full.num_trainable_parameters == full.num_parameters
    assert plain.num_parameters == full.num_parameters + plain.num_trainable_parameters


def test_counts_of_an_unrolled_model_are_those_of_the_whole() -> None:
    recipe = Recipe().with_changes({"data.max_length": 16})
    from transformers import AutoModelForCausalLM

    from workbench.components.source import find_source

    source = find_source(recipe, for_training=False)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(source.config)
    estimate = estimate_run(recipe, T4)
    assert estimate.num_parameters - estimate.num_trainable_parameters == sum(p.numel() for p in whole.parameters())


def test_layers_that_only_the_first_differs_from_are_unrolled_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 7, "vocab_size": 64}
    recipe = Recipe().with_changes({"model.config": config, "data.max_length": 8})
    unrolled: list[int] = []

    def counted(*args: object) -> object:
        unrolled.append(1)
        return unroll(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "unroll", counted)
    clear_caches()
    short = estimate_run(recipe, T4)
    assert unrolled
    monkeypatch.setattr(run, "layer_period", lambda *_: None)
    clear_caches()
    whole = estimate_run(recipe, T4)
    clear_caches()
    assert len(unrolled) == 1
    assert (short.num_parameters, short.time.flops) == (whole.num_parameters, whole.time.flops)
    assert short.memory.peak_allocated_bytes == whole.memory.peak_allocated_bytes


def test_a_second_estimate_comes_from_the_cache_and_says_the_same() -> None:
    clear_caches()
    first = estimate_run(TINY, T4)
    second = estimate_run(TINY.with_changes({"training.learning_rate": 1e-5}), T4)
    assert (first.was_cached, second.was_cached) == (False, True)
    assert second.memory == first.memory


def test_traces_repeat_to_the_byte() -> None:
    results = []
    for _ in range(2):
        clear_caches()
        results.append(estimate_run(TINY, T4).memory)
    assert results[0] == results[1]


def test_nothing_global_is_touched() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    dtype, grad, capability = torch.get_default_dtype(), torch.is_grad_enabled(), torch.cuda.get_device_capability
    clear_caches()
    with torch.no_grad():
        estimate_run(TINY.with_changes({"training.gradient_checkpointing": True, "adapter.lora_dropout": 0.1}), T4)
        assert not torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (dtype, grad)
    assert torch.cuda.get_device_capability is capability
    assert not torch.is_autocast_enabled("cuda")
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0
    assert all(built.model.training for built in run._MODELS.values())
    assert all(p.grad is None for built in run._MODELS.values() for p in built.model.parameters())


def test_training_beside_a_trace_is_not_disturbed() -> None:
    def train(stop: threading.Event | None) -> list[float]:
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        losses = []
        for _ in range(150):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = layer(torch.ones(4, 16)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if stop is not None and len(losses) >= 150:
                break
        return losses

    alone = train(None)
    clear_caches()
    result: list[object] = []
    recipe = TINY.with_changes({"training.gradient_checkpointing": True, "adapter.lora_dropout": 0.1})
    thread = threading.Thread(target=lambda: result.append(estimate_run(recipe, T4)))
    thread.start()
    beside = train(threading.Event())
    thread.join()
    assert result
    assert beside == alone


def test_cancelled_before_and_while_waiting() -> None:
    clear_caches()
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        estimate_run(TINY, T4, cancel=cancel)
    from workbench.estimate.trace import exclusive

    with exclusive(None), pytest.raises(Cancelled):
        estimate_run(TINY, T4, cancel=cancel)
    assert estimate_run(TINY, T4).memory.fits


def test_rules_are_asked_first() -> None:
    with pytest.raises(RecipeError, match="bfloat16"):
        estimate_run(TINY.with_changes({"training.mixed_precision": "bf16"}), T4)


def test_what_cannot_be_traced_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NotImplementedError("aten::odd has no meta kernel")

    clear_caches()
    monkeypatch.setattr(run, "trace_run", fail)
    with pytest.raises(EstimateError, match=r"tiny-llama cannot be traced .*aten::odd"):
        estimate_run(TINY, T4)


def test_what_is_not_modelled_widens_the_interval() -> None:
    a100 = find_device("A100-SXM4-80GB")
    plain = estimate_run(TINY, a100)
    compiled = estimate_run(TINY.with_changes({"training.torch_compile": True}), a100)
    assert any("not modelled" in note for note in compiled.notes)
    assert compiled.memory.interval_bytes[1] > plain.memory.interval_bytes[1]


def test_workspaces_follow_the_torch_version() -> None:
    h100 = find_device("H100 80GB HBM3")
    old = estimate_run(TINY.with_changes({"hardware.torch_version": "2.9.0"}), find_device("RTX 5090"))
    new = estimate_run(TINY.with_changes({"hardware.torch_version": "2.14.1"}), find_device("RTX 5090"))
    assert new.memory.breakdown["workspace"] - old.memory.breakdown["workspace"] == 2 * (32 * 2**20 - 8_519_680)
    assert estimate_run(TINY, h100).memory.breakdown["workspace"] == 64 * 2**20


def test_expandable_segments_reserve_no_more_than_pages() -> None:
    plain = estimate_run(TINY, T4).memory
    expandable = estimate_run(TINY.with_changes({"hardware.expandable_segments": True}), T4).memory
    assert expandable.peak_allocated_bytes <= plain.peak_allocated_bytes
    assert expandable.peak_reserved_bytes - expandable.peak_allocated_bytes <= 2 * 22 * 2**20
