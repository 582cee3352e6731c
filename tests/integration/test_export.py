"""Exports of real runs: the script repeats the losses, the merged model answers as the adapter does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.export import export_run
from workbench.pipeline import start_session
from workbench.recipe import Recipe

SMALL = {
    "model.name_or_path": "tiny-llama", "data.max_rows": 22, "data.max_length": 64, "training.max_steps": 5,
    "evaluation.split": "none",
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "lora": {"training.gradient_checkpointing": True, "training.warmup_steps": 2},
    "full, packed": {"adapter.method": "none", "data.packing": True, "training.optim": "adamw_torch"},
    "grouped": {"data.group_by_length": True, "training.weight_decay": 0.1},
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_script_alone_has_the_losses_of_the_run(name: str, tmp_path: Path) -> None:
    recipe = Recipe().with_changes(SMALL | CASES[name])
    start_session(recipe, run_dir=tmp_path / "run").wait()
    report = export_run(tmp_path / "run", "script", tmp_path / "script")
    # Without the workbench: importing it fails there.
    blocked = tmp_path / "blocked" / "workbench.py"
    blocked.parent.mkdir()
    blocked.write_text("raise ImportError('the script needs the workbench')")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(blocked.parent)!r}); "
               f"import runpy; runpy.run_path({str(report.path / 'train.py')!r}, run_name='__main__')"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = [tuple(map(float, pair)) for pair in re.findall(r"loss ([\d.]+)  grad_norm ([\d.]+)", done.stdout)]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [(round(row["loss"], 6), round(row["grad_norm"], 6)) for row in rows]
    assert printed == expected
    assert (report.path / "result").is_dir()


def test_a_merged_model_is_read_back_and_compared(tmp_path: Path) -> None:
    changes = SMALL | {"training.learning_rate": 1e-2, "training.max_steps": 3}
    start_session(Recipe().with_changes(changes), run_dir=tmp_path / "run").wait()
    report = export_run(tmp_path / "run", "merged")
    assert report.checks["same_next_token_fraction"] == 1.0
    assert report.checks["max_logit_difference"] < 1e-4
    assert (report.path / "model.safetensors").is_file() and (report.path / "tokenizer.json").is_file()
