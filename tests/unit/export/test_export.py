"""Exports: whole or not there at all, and never at the cost of the source."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.errors import ExportError, RunFolderError
from workbench.export import FORMATS, export_run
from workbench.export import export as module
from workbench.export.card import render_card
from workbench.export.page import read_grades
from workbench.recipe import Recipe
from workbench.train.run_folder import summarise_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "recipe.yaml").write_text(Recipe().to_yaml())
    (folder / "metrics.jsonl").write_text('{"step": 3, "loss": 1.25}\n')
    return folder


def test_an_adapter_is_copied_with_a_card(run_dir: Path) -> None:
    report = export_run(run_dir, "adapter")
    assert report.path == run_dir / "exports" / "adapter"
    assert (report.path / "adapter_model.safetensors").read_bytes() == b"weights"
    card = (report.path / "README.md").read_text()
    assert "Last training loss: 1.2500" in card and "library_name: peft" in card
    assert report.num_bytes == sum(file.stat().st_size for file in report.path.iterdir())


def test_what_exists_is_not_overwritten(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ExportError, match="exists already"):
        export_run(run_dir, "adapter", tmp_path / "there")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing_half_written(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(job: module.Job) -> module.Written:
        (job.target / "half").write_text("x")
        raise error

    monkeypatch.setitem(module._WRITERS, "adapter", fail)
    with pytest.raises((RunFolderError, KeyboardInterrupt)):
        export_run(run_dir, "adapter")
    assert not list((run_dir / "exports").iterdir())
    assert (run_dir / "adapter" / "adapter_model.safetensors").read_bytes() == b"weights"


def test_a_bottleneck_adapter_is_not_merged_and_its_card_says_how_to_load_it(run_dir: Path) -> None:
    (run_dir / "recipe.yaml").write_text(Recipe().with_changes({"adapter.method": "bottleneck"}).to_yaml())
    with pytest.raises(ExportError, match="cannot be merged: they compute something nonlinear"):
        export_run(run_dir, "merged")
    card = (export_run(run_dir, "adapter").path / "README.md").read_text()
    assert "library_name: transformers" in card and "load_trained" in card


def test_unknown_formats_and_empty_runs_are_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="there are adapter, merged, script, report, gguf-f16"):
        export_run(run_dir, "zip")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "recipe.yaml").write_text(Recipe().to_yaml())
    with pytest.raises(ExportError, match="no trained weights yet"):
        export_run(empty, "merged")
    assert set(module._WRITERS) == set(FORMATS)


def test_a_card_shows_names_as_text_only(run_dir: Path) -> None:
    recipe = Recipe().with_changes({"model.name_or_path": "<img src=x onerror=alert(1)>"})
    assert "<img" not in render_card(recipe, summarise_run(run_dir), "adapter").split("```yaml")[0]


HANG = """
import sys, time
from pathlib import Path
from workbench.export import export as module
def hang(job):
    (job.target / "half").write_bytes(b"x" * 1000)
    print("writing", flush=True)
    time.sleep(60)
module._WRITERS["adapter"] = hang
module.export_run(sys.argv[1], "adapter")
"""


def test_a_killed_export_is_never_taken_for_a_whole_one(run_dir: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HANG, str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        with pytest.raises(ExportError, match="Another process is writing"):
            export_run(run_dir, "adapter")
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    left = [path.name for path in (run_dir / "exports").iterdir()]
    assert left == [".adapter.partial"] and read_grades(run_dir) == {}
    report = export_run(run_dir, "adapter")
    assert [path.name for path in (run_dir / "exports").iterdir()] == ["adapter"]
    assert {path.name for path in report.path.iterdir()} == {"adapter_model.safetensors", "README.md"}


def test_a_full_disk_is_one_sentence(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(job: module.Job) -> module.Written:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(module._WRITERS, "adapter", fill)
    with pytest.raises(RunFolderError) as caught:
        export_run(run_dir, "adapter")
    text = str(caught.value)
    assert "No space left on device" in text and "unharmed" in text and "\n" not in text


def test_a_card_tells_the_grade_and_how_to_load(run_dir: Path) -> None:
    grade = {
        "num_bytes": 2**20, "compression": 3.5, "perplexity": 11.0, "merged_perplexity": 10.0, "num_rows": 8,
        "rows": "held-out", "num_tokens": 99, "accuracy_fraction": 0.5, "merged_accuracy_fraction": 0.6,
        "mean_logit_difference": 0.01, "logit_std": 1.0, "same_next_token_fraction": 0.97, "reader": "somebody",
    }  # fmt: skip
    card = render_card(Recipe(), summarise_run(run_dir), "gguf-q4_0", grade)
    assert "# GGUF file (Q4_0) of" in card and "llama-cli -m model.gguf" in card and "library_name: gguf" in card
    assert "11.0000, merged model 10.0000 (+10.00%)" in card and "Read back by somebody" in card and "licence" in card
    assert "onnxruntime.InferenceSession" in render_card(Recipe(), summarise_run(run_dir), "onnx")
