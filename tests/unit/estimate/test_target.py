"""Meta tensors behave like those of the target, in this thread only."""

from __future__ import annotations

import threading

import torch
from torch.nn import functional

from workbench.estimate.target import TargetMode, answers_of
from workbench.hardware import Device, find_device

GPU = find_device("A100-SXM4-80GB")
CPU = Device(name="CPU", kind="cpu", capacity_bytes=2**34)


def _meta(*shape: int, dtype: torch.dtype = torch.float32, trains: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trains)


def test_meta_tensors_say_they_are_on_the_target() -> None:
    value = _meta(2)
    with TargetMode(GPU):
        assert value.device.type == "cuda"
        assert value.is_cuda
        assert torch.arange(3, device=value.device).is_meta
        assert value.to("cuda").is_meta
    with TargetMode(CPU):
        assert value.device.type == "cpu"
        assert torch.zeros(3).is_meta
    assert value.device.type == "meta"


def test_autocast_follows_the_lists_of_cuda() -> None:
    left, weight = _meta(4, 8), _meta(8, 8, trains=True)
    mode = TargetMode(GPU)
    with mode, mode.autocast(torch.bfloat16):
        assert functional.linear(left, weight).dtype == torch.bfloat16
        assert functional.layer_norm(_meta(4, 8, dtype=torch.bfloat16), (8,)).dtype == torch.float32
        assert torch.softmax(_meta(4, dtype=torch.bfloat16), 0).dtype == torch.float32
        assert functional.silu(_meta(4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")


def test_autocast_of_the_cpu_leaves_layer_norm_in_16_bits() -> None:
    mode = TargetMode(CPU)
    with mode, mode.autocast(torch.bfloat16):
        assert functional.layer_norm(_meta(4, 8, dtype=torch.bfloat16), (8,)).dtype == torch.bfloat16
        assert torch.matmul(_meta(4, 8), _meta(8, 4)).dtype == torch.bfloat16


def test_only_trainable_weights_are_cast_once() -> None:
    mode = TargetMode(GPU)
    frozen, trainable = _meta(8, 8), _meta(8, 8, trains=True)
    with mode, mode.autocast(torch.float16):
        for _ in range(2):
            functional.linear(_meta(4, 8), frozen)
            functional.linear(_meta(4, 8), trainable)
        assert list(mode.cast_cache) == [id(trainable)]
    assert not mode.cast_cache


def test_dropout_on_cuda_keeps_a_mask_of_bytes() -> None:
    with TargetMode(GPU):
        result = functional.dropout(_meta(4, 8, trains=True), 0.1, True)
    assert result.grad_fn is not None
    assert "NativeDropout" in type(result.grad_fn).__name__


def test_another_thread_sees_nothing() -> None:
    seen: dict[str, object] = {}

    def look() -> None:
        value = _meta(2)
        seen["device"] = value.device.type
        seen["autocast"] = torch.is_autocast_enabled("cuda")

    mode = TargetMode(GPU)
    with mode, mode.autocast(torch.bfloat16), answers_of(mode):
        assert torch.cuda.get_device_capability() == (8, 0)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == {"device": "meta", "autocast": False}
