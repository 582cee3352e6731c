"""Exports of real runs: the script repeats the losses, the merged model answers as the adapter does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import ExportError
from workbench.export import export_run, load_trained
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "run"
    changes = SMALL | {"training.learning_rate": 1e-2, "training.max_steps": 3, "evaluation.split": "auto"}
    start_session(Recipe().with_changes(changes), run_dir=folder).wait()
    return folder


# What each loses at most of a random model: mean difference of the logits as a share of their spread.
GRADED = {"onnx": (0.6, 1e-4), "gguf-q8_0": (3.3, 0.02), "bnb-8bit": (2.5, 0.02), "bnb-4bit": (3.0, 0.15)}


@pytest.mark.parametrize("to", list(GRADED))
def test_each_format_is_read_back_and_graded(trained: Path, to: str) -> None:
    compression, lost = GRADED[to]
    report = export_run(trained, to)
    grade = report.grade
    assert grade is not None and grade["rows"] == "held-out" and grade["num_tokens"] > 50
    assert compression < grade["compression"] < compression * 1.3
    assert grade["mean_logit_difference"] < lost * grade["logit_std"]
    assert grade["perplexity"] == pytest.approx(grade["merged_perplexity"], rel=0.02)
    assert grade["tokens_per_s"] > 0
    stored = json.loads((report.path / "export.json").read_text())
    assert stored["grade"] == grade and not (report.path / ".merged").exists()
    assert "Perplexity on" in (report.path / "README.md").read_text()
    if to == "onnx":
        require_free_sizes(trained, report.path)


def require_free_sizes(run_dir: Path, folder: Path) -> None:
    """Assert that a graph takes other sizes than its example's two rows, and padding, as the run's own model does."""
    import onnxruntime
    import torch

    model, _ = load_trained(run_dir)
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    for num_rows in (1, 3):
        ids = torch.arange(num_rows * 11).reshape(num_rows, 11)
        mask = torch.ones_like(ids)
        mask[-1, 4:] = 0
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask).logits
        found = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
        assert torch.allclose(torch.from_numpy(found)[mask.bool()], expected[mask.bool()], atol=1e-4)


def test_a_format_of_other_tasks_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "adapter").mkdir(parents=True)
    recipe = Recipe().with_changes(SMALL | {"model.task": "sequence-classification"})
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    with pytest.raises(ExportError, match="onnx is written for causal language models"):
        export_run(folder, "onnx")
    assert list((folder / "exports").iterdir()) == []


def test_torchao_weights_are_read_back(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="an extra of its own: its import slows every start of PEFT")
    report = export_run(trained, "torchao-int8", tmp_path / "ao")
    assert report.grade is not None and report.grade["mean_logit_difference"] < 0.02 * report.grade["logit_std"]
