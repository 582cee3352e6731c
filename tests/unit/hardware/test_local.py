from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from workbench.errors import Cancelled, DeviceError
from workbench.events import Cancel
from workbench.hardware import calibrate, local, probes
from workbench.hardware.store import Profile, save_profile


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An own cache, and one thread: its time is the process's own, whatever else runs on the machine."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    local._quick_profile.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    local._quick_profile.cache_clear()


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


def test_calibration_is_stored_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few points of few probes, so that it takes a second."""
    monkeypatch.setattr(calibrate, "SECONDS_PER_PROBE", 0.01)
    monkeypatch.setattr(calibrate, "SECONDS_PER_POINT", 0.0005)
    monkeypatch.setattr(probes, "PRODUCT_SIDES", {"float32": (16, 64), "bfloat16": (16, 32)})
    monkeypatch.setattr(probes, "LENGTHS", (16, 32))
    monkeypatch.setattr(probes, "PACKED_SIDES", ((16,), (64,), (64,)))
    monkeypatch.setattr(probes, "OPERAND_BYTES", (2**12, 2**14))
    monkeypatch.setattr(probes, "OF_LOGITS", frozenset())
    monkeypatch.setattr(probes, "OPERATORS", {name: probes.OPERATORS[name] for name in ("mul", "mul_", "add", "silu")})
    seen = []
    device = calibrate.calibrate_device(lambda progress: seen.append(progress.message), kind="cpu")
    assert "Measuring matmul.float32.nt" in seen
    assert {"matmul.bfloat16.tn", "attention.backward.float32", "silu"} <= set(device.rates)
    assert all(point[-1] > 0 for points in device.rates.values() for point in points)
    assert set(device.overhead_s) == {"forward", "backward", "optimizer"}
    stored = local.read_device("cpu")
    assert stored.overhead_s == device.overhead_s
    assert [tuple(point) for point in stored.rates["silu"]] == device.rates["silu"]


def test_a_quick_profile_knows_how_slow_bfloat16_is() -> None:
    device = local.read_device("cpu")
    left, right = torch.ones(128, 128, dtype=torch.bfloat16), torch.ones(128, 128, dtype=torch.bfloat16)
    one = probes.shortest(lambda: left @ right, time.process_time, 0.01)
    # The rate is that of all layouts, of which this is one: within a factor that no other dtype would meet by chance
    # where bfloat16 is emulated, and that other programs on the machine do not exceed.
    assert device.flops_per_s["bfloat16"] < 30 * 2 * 128**3 / one
    if not device.bf16_native and device.flops_per_s["bfloat16"] < 0.5 * device.flops_per_s["float32"]:
        assert device.flops_per_s["float16"] == device.flops_per_s["bfloat16"]


def test_a_cancelled_calibration_stores_nothing(tmp_path: Path) -> None:
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        calibrate.calibrate_device(cancel=cancel)
    assert not (tmp_path / "profiles").exists()
