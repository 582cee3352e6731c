"""Exports: whole or not there at all, and never at the cost of the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.errors import ExportError, RunFolderError
from workbench.export import FORMATS, export_run
from workbench.export import export as module
from workbench.export.card import render_card
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
    def fail(*args: object) -> dict[str, object]:
        (args[2] / "half").write_text("x")  # type: ignore[operator]  # the target's path
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
    with pytest.raises(ExportError, match="there are adapter, merged, script"):
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
