"""Run folders: locks, atomic writes, lists."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from workbench.errors import RunFolderError
from workbench.recipe import Recipe
from workbench.train import lock as lock_module
from workbench.train import run_folder as run_folder_module
from workbench.train.lock import FolderLock
from workbench.train.run_folder import (
    RunFolder,
    find_checkpoint,
    list_checkpoints,
    list_runs,
    new_path,
    read_recipe_of,
    summarise_run,
)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder.create(Recipe(), tmp_path / "run")
    yield folder
    folder.release()


def _checkpoint(folder, step):
    with folder.write_directory(f"checkpoints/step-{step:06d}") as temporary:
        (temporary / "weights").write_text(str(step))


def test_the_recipe_is_written_and_read_back(tmp_path):
    recipe = Recipe().with_changes({"training.learning_rate": 3e-5})
    RunFolder.create(recipe, tmp_path / "run").release()
    assert read_recipe_of(tmp_path / "run") == recipe
    with pytest.raises(RunFolderError, match="no run folder"):
        read_recipe_of(tmp_path)


def test_a_folder_with_a_run_is_not_overwritten(folder):
    (folder.path / "metrics.jsonl").write_text('{"step": 1}\n')
    folder.release()
    with pytest.raises(RunFolderError, match=r"already holds a run.*--resume"):
        RunFolder.create(Recipe(), folder.path)
    assert (folder.path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_an_empty_folder_of_the_user_is_taken(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    RunFolder.create(Recipe(), tmp_path / "mine").release()
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_a_second_holder_in_this_process_is_refused(folder):
    with pytest.raises(RunFolderError, match="in use by another run of this process"):
        RunFolder.reopen(folder.path)
    folder.release()
    folder.release()
    RunFolder.reopen(folder.path).release()


def test_another_process_is_named_and_its_lock_dies_with_it(tmp_path):
    code = f"""
        import sys
        from pathlib import Path
        from workbench.train.lock import FolderLock
        lock = FolderLock.acquire(Path({str(tmp_path)!r}))
        print("held", flush=True)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline().strip() == "held"
        assert FolderLock.is_held(tmp_path)
        with pytest.raises(RunFolderError, match=rf"in use by process {process.pid} on \S+ since \d\d:\d\d\. Stop"):
            FolderLock.acquire(tmp_path)
    finally:
        process.kill()
        process.wait()
    assert not FolderLock.is_held(tmp_path)
    FolderLock.acquire(tmp_path).release()


def test_without_system_locks_the_process_and_the_beat_decide(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "_try_system_lock", lambda handle: None)
    path = tmp_path / "lock"
    held = FolderLock.acquire(tmp_path)
    with pytest.raises(RunFolderError, match="in use"):
        FolderLock.acquire(tmp_path)
    held.release()
    FolderLock.acquire(tmp_path).release()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    path.write_text(json.dumps({"pid": dead.pid, "host": lock_module.socket.gethostname()}))
    FolderLock.acquire(tmp_path).release()
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with pytest.raises(RunFolderError, match="process 1 on elsewhere"):
        FolderLock.acquire(tmp_path)
    os.utime(path, (0, 0))
    FolderLock.acquire(tmp_path).release()


def test_beats_touch_the_lock_now_and_then(tmp_path, monkeypatch):
    held = FolderLock.acquire(tmp_path)
    os.utime(tmp_path / "lock", (0, 0))
    held.beat()
    assert (tmp_path / "lock").stat().st_mtime == 0
    monkeypatch.setattr(lock_module, "BEAT_INTERVAL_S", -1.0)
    held.beat()
    assert (tmp_path / "lock").stat().st_mtime > 0
    held.release()


def test_a_directory_appears_whole_or_not_at_all(folder):
    _checkpoint(folder, 5)
    with pytest.raises(ZeroDivisionError), folder.write_directory("checkpoints/step-000005") as temporary:
        (temporary / "weights").write_text("half")
        raise ZeroDivisionError
    assert (folder.path / "checkpoints" / "step-000005" / "weights").read_text() == "5"
    assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["step-000005"]
    with folder.write_directory("checkpoints/step-000005") as temporary:
        assert (folder.path / "checkpoints" / "step-000005" / "weights").read_text() == "5"
        (temporary / "weights").write_text("new")
    assert (folder.path / "checkpoints" / "step-000005" / "weights").read_text() == "new"


def test_an_old_directory_survives_when_the_new_one_cannot_take_its_place(folder, monkeypatch):
    _checkpoint(folder, 5)
    original = type(folder.path).rename

    def fails(self, target):
        if self.name.startswith(".writing-step"):
            raise OSError(5, "Input/output error")
        return original(self, target)

    monkeypatch.setattr(type(folder.path), "rename", fails)
    with pytest.raises(RunFolderError, match="Input/output error"):
        _checkpoint(folder, 5)
    assert (folder.path / "checkpoints" / "step-000005" / "weights").read_text() == "5"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(30, "Read-only file system"), "Read-only file system"),
        (RuntimeError("PytorchStreamWriter failed writing file data/3"), "PytorchStreamWriter failed"),
    ],
)
def test_disk_errors_become_one_sentence(folder, error, text):
    with pytest.raises(RunFolderError, match=text) as info, folder.write_directory("adapter"):
        raise error
    assert "\n" not in str(info.value)
    assert not (folder.path / "adapter").exists()


def test_a_path_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunFolder.create(Recipe(), tmp_path / "file" / "run")


def test_leftovers_of_a_crash_are_removed_when_the_run_goes_on(folder):
    _checkpoint(folder, 5)
    (folder.path / "checkpoints" / ".writing-step-000009").mkdir()
    (folder.path / ".writing-adapter").mkdir()
    folder.release()
    assert [path.name for path in list_checkpoints(folder.path)] == ["step-000005"]
    RunFolder.reopen(folder.path).release()
    assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["step-000005"]
    assert not (folder.path / ".writing-adapter").exists()


def test_checkpoints_are_ordered_by_step_and_the_best_is_protected(folder):
    for step in (999_999, 1_000_000, 5, 20):
        _checkpoint(folder, step)
    names = [path.name for path in list_checkpoints(folder.path)]
    assert names == ["step-000005", "step-000020", "step-999999", "step-1000000"]
    folder.remove_old_checkpoints(None)
    folder.remove_old_checkpoints(2, protect=folder.path / "checkpoints" / "step-000005")
    assert [path.name for path in list_checkpoints(folder.path)] == ["step-000005", "step-999999", "step-1000000"]


def test_what_to_continue_from_is_found(folder):
    _checkpoint(folder, 5)
    _checkpoint(folder, 7)
    last = folder.path / "checkpoints" / "step-000007"
    assert find_checkpoint(folder.path) == (folder.path, last)
    assert find_checkpoint(last.with_name("step-000005")) == (folder.path, last.with_name("step-000005"))
    with pytest.raises(RunFolderError, match="no run folder"):
        find_checkpoint(folder.path / "nowhere")


def test_runs_are_listed_newest_first_with_their_numbers(tmp_path):
    for index, name in enumerate(("old", "new")):
        folder = RunFolder.create(Recipe().with_changes({"data.name_or_path": name}), tmp_path / name)
        (folder.path / "metrics.jsonl").write_text(
            '{"step": 1, "loss": 3.0, "eval_loss": 2.5}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo'
        )
        (folder.path / "events.jsonl").write_text('{"kind": "state", "data": {"state": "done"}}\n')
        os.utime(folder.path / "recipe.yaml", (index + 1, index + 1))
        folder.release()
    (tmp_path / "no run").mkdir()
    runs = list_runs(tmp_path)
    assert [run.name for run in runs] == ["new", "old"]
    run = runs[0]
    assert (run.state, run.num_steps_done, run.loss, run.eval_loss) == ("done", 2, 2.0, 2.5)
    assert (run.model, run.data, run.method) == ("smollm2-135m-instruct", "new", "lora")
    assert run.num_bytes == sum(path.stat().st_size for path in (tmp_path / "new").rglob("*") if path.is_file())
    assert list_runs(tmp_path / "nothing") == []


def test_a_run_whose_process_died_counts_as_failed(folder):
    (folder.path / "events.jsonl").write_text('{"kind": "state", "data": {"state": "running"}}\n')
    assert summarise_run(folder.path).state == "running"
    folder.release()
    assert summarise_run(folder.path).state == "failed"


def test_a_damaged_recipe_does_not_hide_the_other_runs(folder):
    (folder.path / "recipe.yaml").write_text("model: [")
    assert summarise_run(folder.path).model == "?"


def test_long_metrics_files_are_read_from_their_end(folder, monkeypatch):
    monkeypatch.setattr(run_folder_module, "_TAIL_BYTES", 200)
    lines = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 1001))
    (folder.path / "metrics.jsonl").write_text(lines)
    assert summarise_run(folder.path).num_steps_done == 1000


def test_new_folders_have_names_of_their_own(tmp_path):
    recipe = Recipe().with_changes({"model.name_or_path": "../we ird/<b>näme</b>/"})
    first = new_path(recipe, tmp_path)
    first.mkdir()
    second = new_path(recipe, tmp_path)
    assert first.parent == second.parent == tmp_path
    assert first != second
    assert all(letter.isalnum() or letter in "-._" for letter in first.name)
