"""FSDP2's numbers over gloo, through torch itself: accelerate's FSDP2 becomes DDP on a CPU without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .fsdp_steps import build, train


@pytest.mark.slow
def test_cut_over_two_ranks_it_learns_what_one_device_learns(tmp_path: Path) -> None:
    result = tmp_path / "result.pt"
    script = Path(__file__).with_name("fsdp_rank.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(result)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = torch.load(result)
    recipe, model, data, collate = build()
    losses = train(recipe, model, data, collate)
    assert found["losses"] == pytest.approx(losses, abs=1e-5)
    whole = dict(model.named_parameters())
    for name, weight in found["weights"].items():
        assert float((weight - whole[name]).detach().abs().max()) < 1e-5, name
    total = sum(parameter.numel() for parameter in whole.values())
    assert total / 2 <= found["local"] < 0.51 * total
