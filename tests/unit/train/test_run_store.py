"""Run folders are renamed and deleted, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.errors import RunFolderError
from workbench.recipe import Recipe
from workbench.train.run_folder import RunFolder
from workbench.train.run_store import delete_run, folder_bytes, rename_run


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    folder = RunFolder.create(Recipe(), tmp_path / "one")
    folder.release()
    (folder.path / "adapter").mkdir()
    (folder.path / "adapter" / "weights").write_bytes(b"x" * 1000)
    return folder.path


def test_a_run_gets_another_name(ended: Path) -> None:
    new = rename_run(ended, " my run ")
    assert new == ended.with_name("my run")
    assert (new / "adapter" / "weights").is_file()
    assert not ended.exists()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a\\b", "x" * 121, "nul\x00"])
def test_what_is_no_name_is_refused(ended: Path, name: str) -> None:
    with pytest.raises(RunFolderError, match="cannot be a folder's name"):
        rename_run(ended, name)
    assert ended.is_dir()


def test_a_taken_name_is_refused(ended: Path) -> None:
    ended.with_name("two").mkdir()
    with pytest.raises(RunFolderError, match="exists already"):
        rename_run(ended, "two")


def test_a_deleted_run_is_gone_with_everything_in_it(ended: Path) -> None:
    size = folder_bytes(ended)
    assert size > 1000
    assert delete_run(ended) == size
    assert list(ended.parent.iterdir()) == []


def test_a_folder_that_is_no_run_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    with pytest.raises(RunFolderError, match="is no run folder"):
        delete_run(tmp_path / "thesis")
    assert (tmp_path / "thesis").is_dir()


def test_a_link_to_a_run_is_not_followed(ended: Path) -> None:
    link = ended.with_name("link")
    link.symlink_to(ended)
    with pytest.raises(RunFolderError, match="is a link"):
        delete_run(link)
    assert ended.is_dir()


def test_a_live_run_is_neither_renamed_nor_deleted(tmp_path: Path) -> None:
    folder = RunFolder.create(Recipe(), tmp_path / "live")
    try:
        for act in (lambda: delete_run(folder.path), lambda: rename_run(folder.path, "other")):
            with pytest.raises(RunFolderError, match="in use by a run"):
                act()
    finally:
        folder.release()
    assert delete_run(folder.path) > 0
