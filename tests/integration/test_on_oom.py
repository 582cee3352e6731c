"""A run that meets the end of memory goes on by itself, with the loss curve of one that had room."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workbench import Recipe
from workbench.pipeline import start_session

SETTINGS = {
    "model.name_or_path": "tiny-llama",
    "data.max_length": 256,
    "data.max_rows": 48,
    "evaluation.split": "none",
    "training.max_steps": 4,
    "training.learning_rate": 1e-3,
    "training.per_device_train_batch_size": 8,
    "training.gradient_accumulation_steps": 1,
    "training.optim": "sgd",
    "hardware.device": "cpu",
}


class Batches:
    """An Observer that keeps what is told of the size of batches."""

    def __init__(self) -> None:
        self.told: list[dict[str, object]] = []

    def on_event(self, event) -> None:
        if event.kind == "batch":
            self.told.append(dict(event.data))


@pytest.mark.parametrize("policy", ["halve_micro_batch", "adapt_micro_batch"])
def test_the_loss_curve_is_that_of_a_run_with_room(tmp_path: Path, policy: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        roomy = start_session(Recipe().with_changes(SETTINGS), run_dir=tmp_path / "roomy").wait()
        seen = Batches()
        tight = Recipe().with_changes(
            {**SETTINGS, "hardware.emulate": "Tesla T4:210MiB", "policies.on_oom": policy}
        )  # fmt: skip
        session = start_session(tight, run_dir=tmp_path / "tight", observers=[seen]).wait()
    finally:
        torch.set_num_threads(before)
    assert session.state == "done" and session.step == 4 and not session.findings
    assert seen.told[0]["micro_batch_size"] < 8
    assert seen.told[0]["micro_batch_size"] * seen.told[0]["gradient_accumulation_steps"] == 8
    for column in ("loss", "grad_norm"):
        assert session.history.column(column) == pytest.approx(roomy.history.column(column), rel=1e-4), column
    assert session.history.column("num_tokens").tolist() == roomy.history.column("num_tokens").tolist()
    limit = 210 * 2**20
    assert session.history.column("process_bytes").max() <= limit
