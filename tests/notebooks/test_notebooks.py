"""Every notebook runs from top to bottom without a browser, its hidden answers too, and is stored without outputs."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
FIRST, *WORKSHOP = NOTEBOOKS
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def answers(source: str) -> list[str]:
    """Return the code that the ``<details>`` of a cell hide."""
    return [
        code for hidden in re.findall(r"<details>.*?</details>", source, re.DOTALL) for code in CODE.findall(hidden)
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("path", WORKSHOP, ids=lambda path: path.name)
def test_a_workshop_notebook_has_a_goal_and_ends_in_an_exercise_with_a_hidden_answer(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert "**Goal.**" in cells[0].source
    assert cells[-1].source.startswith("## Exercise")
    assert answers(cells[-1].source), "the answer is code that can be run"
    assert cells[-1].source.index("<summary>") > cells[-1].source.index("<details>")


def run_notebook(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run a notebook in a folder, each hidden answer behind its cell; return the code cells with their outputs."""
    from nbclient import NotebookClient

    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(path, as_version=4)
    cells = []
    for cell in notebook.cells:
        hidden = answers(cell.source) if cell.cell_type == "markdown" else []
        cells += [cell, *map(nbformat.v4.new_code_cell, hidden)]
    notebook.cells = cells
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=dict(os.environ))
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cells: list[Any]) -> str:
    return "\n".join(
        str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", ""))
        for cell in cells
        for output in cell.outputs
    )


@pytest.mark.slow
def test_the_first_notebook_trains_and_keeps_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = run_notebook(FIRST, tmp_path, monkeypatch)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert (run_dir / "adapter" / "adapter_model.safetensors").is_file()
    text = text_of(cells)
    assert "Fine-tuning panel" in text
    assert "done" in text
    pictures = [
        output.data["text/html"] for cell in cells for output in cell.outputs if "text/html" in output.get("data", {})
    ]
    assert "<svg" in pictures[-1], "the saved notebook keeps a picture of the run"
    assert len(pictures) >= 2


# What each notebook must have shown: what it measured and judged itself is asserted in its own cells.
SHOWN = {
    "02-make-it-fit": ("Does not fit on Tesla T4", "keeps the frozen weights in 4 bits", "Fits on NVIDIA L4"),
    "03-oom-clinic": ("oom.activations", "oom.fragmentation", "the rule wants 0", "did not fit and was cut"),
    "04-find-a-leak": (
        "'running_mean' is a running total",
        "leak.hook_buffer",
        "no leak",
        "The last exception (ValueError) kept 8 MiB",
    ),
    "05-loss-went-nan": ("weights that are NaN: 16 of 16", "log of 0 at", "nonfinite.hidden_by_filter"),
    "06-your-own-loop": ("model.optimizer_misses", "training.accumulation", "data.wrong_ignore_index", "module.losses"),
    "07-compare-techniques": ("QLoRA + checkpointing", "of all tokens are padding", "by hand: None", "adapter.r=64"),
    "08-colab": ("nothing is installed", "Fits on Tesla T4", "<Session done", "-adapter.zip"),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", WORKSHOP, ids=lambda path: path.stem)
def test_a_workshop_notebook_runs_with_its_answers(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(run_notebook(path, tmp_path, monkeypatch))
    assert [words for words in SHOWN[path.stem] if words not in text] == []


def test_the_colab_cell_moves_no_package_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = (path for path in NOTEBOOKS if path.stem == "08-colab")
    cell = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(cell.source, names)
    assert not list(tmp_path.iterdir()), "outside Colab the cell does nothing"

    there = [("torch", "2.11.0+cu128"), ("ipywidgets", "7.7.1"), ("Transformers", "5.15.0"), ("bitsandbytes", "0.49.0")]
    wanted = ["torch>=2.9", "transformers>=5.10", "gguf>=0.17", "jupyterlab>=4.2", 'ruff; extra == "test"']
    monkeypatch.setattr(
        importlib.metadata,
        "distributions",
        lambda: [SimpleNamespace(metadata={"Name": name}, version=version) for name, version in there],
    )
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    commands: list[list[str]] = []
    names["install"]("/content/workbench", run=lambda command, check: commands.append(command[4:]))
    assert commands == [
        ["--quiet", "--no-deps", "/content/workbench"],
        ["--quiet", "--constraint", "installed.txt", "gguf>=0.17"],
    ]
    pinned = Path("installed.txt").read_text().splitlines()
    assert "torch==2.11.0+cu128" in pinned and "ipywidgets==7.7.1" in pinned
