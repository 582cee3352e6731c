"""Finding or making the notebook that JupyterLab opens, and a free port."""

import socket
from pathlib import Path

import nbformat
import pytest

from workbench.cli import lab
from workbench.errors import WorkbenchError


def test_the_notebook_of_the_folder_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = tmp_path / "notebooks" / lab.FIRST_NOTEBOOK
    notebook.parent.mkdir()
    notebook.write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert lab._find_notebook(None) == notebook


def test_a_named_notebook_must_exist(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="is not a notebook file"):
        lab._find_notebook(str(tmp_path / "none.ipynb"))


def test_the_starter_is_a_valid_notebook_with_the_panel() -> None:
    notebook = nbformat.from_dict(lab._starter_notebook())
    nbformat.validate(notebook)
    assert "workbench.Workbench()" in notebook.cells[-1].source


def test_a_port_in_use_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert lab._free_port(port) != port
