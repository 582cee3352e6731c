"""Births and deaths of storages, and a device that is full."""

import pytest
import torch
from torch import nn

from workbench.observe.graph_nodes import count_nodes
from workbench.observe.storages import StorageTracker


def test_views_and_in_place_writes_are_no_births() -> None:
    with StorageTracker() as tracker:
        a = torch.ones(8)
        a.view(2, 4).t()
        a.add_(1)
    assert len(tracker.births) == 1
    assert tracker.births[0].num_bytes == 32


def test_a_storage_dies_with_its_last_view() -> None:
    with StorageTracker() as tracker:
        a = torch.ones(8)
        view = a[2:]
        del a
        assert tracker.live_bytes == 32 and tracker.births[0].is_alive
        del view
    assert tracker.live_bytes == 0 and not tracker.births[0].is_alive


def test_what_existed_before_is_no_birth_but_counts() -> None:
    weight = torch.ones(10)
    tracker = StorageTracker()
    tracker.register_existing([weight, weight.view(2, 5)])
    with tracker:
        weight.t()
    assert tracker.births == [] and tracker.live_bytes == 40


def test_births_know_module_phase_and_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with StorageTracker(model) as tracker:
        model(torch.ones(2, 4)).sum().backward()
    forward = [birth for birth in tracker.births if birth.phase == "forward"]
    assert {birth.module for birth in forward} == {"0", "1"}
    assert any(birth.phase == "backward" for birth in tracker.births)
    assert all(birth.line.startswith(__file__) for birth in tracker.births)
    assert not model._forward_hooks


def test_a_full_device_raises_as_torch_does_and_keeps_the_bill() -> None:
    tracker = StorageTracker(limit_bytes=100)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 80 B"), tracker:
        kept = torch.ones(10)
        torch.ones(20)
    assert kept.numel() == 10
    assert tracker.failure is not None and tracker.failure.num_bytes == 80
    assert sum(tracker.keys_at_failure.values()) == 40


def test_nodes_are_counted_once() -> None:
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    assert count_nodes([y, y + 1]) == 3  # AddBackward, MulBackward, AccumulateGrad
    assert count_nodes([y.detach()]) == 0
