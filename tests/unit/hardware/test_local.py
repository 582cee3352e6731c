from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workbench.errors import Cancelled, DeviceError
from workbench.events import Cancel
from workbench.hardware import calibrate, local
from workbench.hardware.store import Profile, save_profile


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))


def test_the_cpu_of_this_machine_has_rates() -> None:
    device = local.read_device("cpu")
    assert (device.kind, device.source, device.is_emulated) == ("cpu", "this machine", False)
    assert device.flops_per_s["float32"] > 1e8
    assert device.bandwidth_bytes_per_s > 1e7
    assert 1e-7 < device.launch_s < 1e-2


def test_a_stored_profile_is_used() -> None:
    save_profile(
        Profile(
            local.cpu_name(),
            torch.__version__,
            torch.get_num_threads(),
            7e9,
            {"float32": 3e11},
            2e-6,
            {"attention": 0.4},
        )
    )
    device = local.read_device("cpu")
    assert device.bandwidth_bytes_per_s == 7e9
    assert device.flops_per_s["float32"] == 3e11
    assert device.efficiency == {"attention": 0.4}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_that_is_not_there_is_an_error() -> None:
    with pytest.raises(DeviceError, match=r"hardware\.device=auto"):
        local.read_device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="calibrates the CUDA device then")
def test_calibration_is_stored_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SECONDS_PER_PROBE", 0.01)
    seen = []
    device = calibrate.calibrate_device(lambda progress: seen.append(progress.message))
    assert any("bandwidth" in message for message in seen)
    assert {"attention", "matmul.float32.large", "matmul.bfloat16.narrow"} <= set(device.efficiency)
    assert all(value > 0 for value in device.efficiency.values())
    assert local.read_device("cpu").efficiency == device.efficiency


def test_a_cancelled_calibration_stores_nothing(tmp_path: Path) -> None:
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        calibrate.calibrate_device(cancel=cancel)
    assert not (tmp_path / "profiles").exists()
