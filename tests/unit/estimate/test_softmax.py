"""Softmax as CUDA runs it: what the fused kernel saves, and the temporary of its backward."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

from workbench.estimate.fake import MetaRecorder
from workbench.estimate.quantized import Card
from workbench.estimate.tape import Tape
from workbench.estimate.target import TargetMode
from workbench.hardware import find_device

ELEMENTS = 64 * 64


def trace_softmax(dtype: torch.dtype) -> Tape:
    """Return the tape of a float32 softmax over scores of ``dtype`` and of its backward."""
    device = find_device("Tesla T4")
    mode = TargetMode(device)
    recorder = MetaRecorder(nn.Module(), answer=True, card=Card(device.compute_capability))
    mode.on_backward = functools.partial(recorder.begin_phase, "backward")
    scores = torch.empty(64, 64, dtype=dtype, device="meta", requires_grad=True)
    with mode, recorder:
        recorder.begin_segment("first", "forward")
        total = functional.softmax(scores, dim=-1, dtype=torch.float32).sum()
        total.backward()
    recorder.close()
    return recorder.tape


def made_by(tape: Tape, operator: str) -> list[int]:
    """Return the bytes of the storages that an operator made, its scratch memory included."""
    names = [tape.operator_names[made].split(" ")[0] for made in tape.operators]
    return [size for size, name in zip(tape.sizes, names, strict=True) if name == operator]


def test_float16_scores_become_float32_probabilities_without_a_copy() -> None:
    tape = trace_softmax(torch.float16)
    assert made_by(tape, "aten._to_copy") == []
    assert made_by(tape, "aten._softmax") == [4 * ELEMENTS]


def test_bfloat16_scores_are_copied_first() -> None:
    assert 4 * ELEMENTS in made_by(trace_softmax(torch.bfloat16), "aten._to_copy")


def test_backward_holds_a_product_of_gradient_and_output_beside_its_result() -> None:
    # float16 in: the result is float16, the product float32.
    assert sorted(made_by(trace_softmax(torch.float16), "aten._softmax_backward_data")) == [2 * ELEMENTS, 4 * ELEMENTS]
