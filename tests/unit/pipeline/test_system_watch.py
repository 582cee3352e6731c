"""Readings of compiler and device: graphs are counted per step, and capability decides about bfloat16."""

import pytest
import torch

from workbench.diagnose.speed import SpeedEvidence, find_speed_faults
from workbench.pipeline.system_watch import SystemWatch, emulator_of_bf16


def test_each_new_shape_that_compiles_again_is_seen() -> None:
    pytest.importorskip("torch._dynamo")
    torch._dynamo.reset()
    speed = SpeedEvidence()
    double = torch.compile(lambda x: (x * 2).relu(), backend="eager", dynamic=False)
    watch = SystemWatch(None, speed)
    for step in range(1, 13):
        double(torch.ones(step, 3))
        speed.step_s.append(0.01)
        watch.step(step)
    assert speed.compiled_at[:3] == [1, 2, 3]
    assert [finding.cause for finding in find_speed_faults(speed)] == ["speed.recompilation"]
    speed.compiled_at.clear()
    double(torch.ones(2, 3))
    watch.step(13)
    assert speed.compiled_at == []
    torch._dynamo.reset()


@pytest.mark.parametrize(("capability", "emulated"), [((7, 5), True), ((7, 0), True), ((8, 0), False), ((9, 0), False)])
def test_capability_decides_about_bfloat16(capability: tuple[int, int], emulated: bool) -> None:
    assert bool(emulator_of_bf16("Tesla T4", capability)) is emulated


def test_a_cpu_run_has_no_device_readings() -> None:
    speed = SpeedEvidence()
    SystemWatch(torch.nn.Linear(2, 2), speed).end(recomputes=True)
    assert speed.recomputes and speed.capacity_bytes == 0 and speed.emulated_bf16 == ""


def test_bfloat16_on_a_cpu_without_units_for_it_is_found_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from workbench import Recipe, hardware
    from workbench.pipeline import checking

    cpu = hardware.read_device("cpu")
    recipe = Recipe().with_changes({"hardware.device": "cpu", "training.mixed_precision": "bf16"})

    def found(recipe: Recipe, *, native: bool) -> list[str]:
        monkeypatch.setattr(hardware, "target_device", lambda recipe: replace(cpu, bf16_native=native))
        return [finding.cause for finding in checking._of_precision(recipe)]

    assert found(recipe, native=False) == ["speed.emulated_bf16"]
    assert found(recipe, native=True) == []
    assert found(recipe.with_changes({"training.mixed_precision": "no"}), native=False) == []
