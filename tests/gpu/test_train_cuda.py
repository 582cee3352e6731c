"""Training on a real GPU: precisions, quantization, paging, the allocator's meter, memory given back."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.observe.meters import choose_meter
from workbench.observe.recorder import Recorder
from workbench.recipe import Recipe
from workbench.train.session import Session

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SMALL = {
    "model.name_or_path": "tiny-llama",
    "data.max_length": 96,
    "data.max_rows": 90,
    "training.max_steps": 6,
    "training.learning_rate": 5e-3,
    "evaluation.max_rows": 8,
    "hardware.device": "cuda",
}

TECHNIQUES = {
    "auto": {},
    "fp16 with loss scaling": {"training.mixed_precision": "fp16"},
    "no autocast": {"training.mixed_precision": "no"},
    "all weights": {"adapter.method": "none"},
    "4-bit, paged, checkpointing": {
        "quantization.load_in_4bit": True,
        "training.optim": "paged_adamw_8bit",
        "training.gradient_checkpointing": True,
    },
    "8-bit": {"quantization.load_in_8bit": True, "training.optim": "adamw_bnb_8bit"},
    "chunked loss, packing": {"training.loss_type": "chunked_nll", "data.packing": True},
    "tf32": {"training.tf32": True, "training.mixed_precision": "no"},
}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_each_technique_trains_measures_and_gives_memory_back(tmp_path, name):
    from workbench.hardware import read_device

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    tf32 = torch.backends.cuda.matmul.allow_tf32
    recipe = Recipe().with_changes({**SMALL, **TECHNIQUES[name]})
    device = read_device("cuda")
    session = Session(recipe, run_dir=tmp_path / "run", device=device, meters=[choose_meter(recipe, device)])
    recorder = Recorder(session.run_dir)
    session.add_observer(recorder)
    session.start().wait(300)
    history = recorder.history
    assert session.state == "done"
    assert all(math.isfinite(loss) for loss in history.column("loss"))
    assert history.last("eval_loss") < history.column("loss")[0]
    assert (history.column("peak_allocated_bytes") > history.column("allocated_bytes")).all()
    assert (history.column("reserved_bytes") >= history.column("peak_allocated_bytes")).all()
    scales = history.column("loss_scale")
    assert bool((scales > 0).all()) is ("fp16" in name)
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    # cuBLAS keeps its workspaces, one for each thread that computed; all else must be gone.
    assert torch.cuda.memory_allocated() - before <= 80 * 2**20


def test_a_resumed_run_follows_the_uninterrupted_one(tmp_path):
    from workbench.train.run_folder import list_checkpoints

    recipe = Recipe().with_changes({**SMALL, "adapter.lora_dropout": 0.1, "training.save_steps": 3})
    losses = {}
    for name, options in (("whole", {}), ("rest", {"resume_from": tmp_path / "whole" / "checkpoints" / "step-000003"})):
        session = Session(recipe, run_dir=tmp_path / name, **options)
        recorder = Recorder(session.run_dir)
        session.add_observer(recorder)
        session.start().wait(300)
        losses[name] = recorder.history.column("loss").tolist()
    assert list_checkpoints(tmp_path / "whole")
    assert losses["rest"] == pytest.approx(losses["whole"][3:], rel=1e-3)
