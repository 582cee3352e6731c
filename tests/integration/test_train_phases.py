"""A run in phases: what trains changes at the border, and a resume inside a phase equals the uninterrupted run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from workbench.events import Event
from workbench.pipeline import start_session
from workbench.recipe import Recipe

RECIPE = Recipe().with_changes(
    {
        "model.name_or_path": "tiny-llama", "data.max_rows": 40, "data.max_length": 64, "evaluation.split": "none",
        "phases.steps": [3, 4], "phases.learning_rate": [1e-2, 1e-3], "phases.trainable_layers": [1, 0],
        "training.save_steps": 0, "training.gradient_accumulation_steps": 2,
    }
)  # fmt: skip


class _StopAt:
    def __init__(self, step: int) -> None:
        self.session: Any = None
        self._step = step

    def on_event(self, event: Event) -> None:
        if event.kind == "step" and event.data["step"] == self._step:
            self.session.stop(save=True)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def test_a_resume_inside_a_phase_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    start_session(RECIPE, run_dir=tmp_path / "whole").wait()
    stopper = _StopAt(5)
    stopped = start_session(RECIPE, run_dir=tmp_path / "parts", observers=[stopper])
    stopper.session = stopped
    stopped.wait()
    assert stopped.state == "stopped" and stopped.step < 7
    start_session(RECIPE, resume_from=tmp_path / "parts").wait()
    whole, parts = _weights(tmp_path / "whole"), _weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 7 and rows[0]["learning_rate"] == 1e-2 and rows[3]["learning_rate"] == 1e-3


def test_the_first_phase_leaves_the_lower_layers_alone(tmp_path: Path) -> None:
    recipe = RECIPE.with_changes({"phases.steps": [3], "phases.learning_rate": [1e-2], "phases.trainable_layers": [1]})
    start_session(recipe, run_dir=tmp_path / "run").wait()
    changed = {name: bool(value.any()) for name, value in _weights(tmp_path / "run").items() if "lora_B" in name}
    last = max(int(name.split("layers.")[1].split(".")[0]) for name in changed)
    # The B matrices begin as zeros: those that never trained are zeros still.
    assert all(moved == (f"layers.{last}." in name) for name, moved in changed.items())
    log = (tmp_path / "run" / "events.jsonl").read_text()
    assert "Phase 1 of 1 begins" in log
