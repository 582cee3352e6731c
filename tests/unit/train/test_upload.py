"""Checkpoints in a store: whole or not there, and a run that goes on from one."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from workbench.errors import RecipeError, RunFolderError
from workbench.recipe import Recipe
from workbench.train import upload as upload_module
from workbench.train.download import fetch_run
from workbench.train.run_folder import list_checkpoints

from .parts import small_recipe


@pytest.fixture
def url():
    """Return a URL in memory that nothing was written to."""
    return f"memory://store-{uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(upload_module, "RETRY_WAITS_S", (0.0, 0.0))


def _files(url):
    store, root = fsspec.core.url_to_fs(url)
    return sorted(path.removeprefix(root) for path in store.find(root)) if store.exists(root) else []


def _logs(session):
    return " ".join(data["message"] for data in session.log.of("log"))


def _weights(folder: Path):
    from safetensors.torch import load_file

    return load_file(next(folder.glob("*.safetensors")))


def _upload_one(tmp_path, url, step=1, keep=2, text=b"weights"):
    """Upload a checkpoint of one file by hand."""
    folder = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(text)
    recipe = Recipe().with_changes({"training.upload_to": url, "training.save_total_limit": keep})
    (tmp_path / "run" / "recipe.yaml").write_text(recipe.to_yaml())
    told = []
    uploader = upload_module.Uploader(recipe, tmp_path / "run", told.append)
    uploader.on_event(upload_module.Event("checkpoint", {"step": step, "path": str(folder)}))
    uploader.finish(30)
    return [event.data["message"] for event in told]


def test_a_fetched_run_goes_on_as_the_uninterrupted_one(tiny, tmp_path, url):
    changes = {"training__save_steps": 2, "training__upload_to": url, "training__save_total_limit": 1}
    whole = tiny(small_recipe(**changes), run_dir="whole").start().wait(60)
    assert "Uploaded checkpoints/step-000006" in _logs(whole)
    assert "Uploaded adapter" in _logs(whole)
    assert any(path.endswith("/whole/adapter/manifest.json") for path in _files(url))
    assert not any(".uploading-" in path for path in _files(url))

    first = tiny(small_recipe(**changes, training__max_steps=4, training__lr_scheduler_type="constant"), run_dir="a")
    first.start().wait(60)
    other = small_recipe(**changes, training__lr_scheduler_type="constant")
    second = tiny(other, run_dir="b", resume_from=f"{url}/a")
    assert [path.name for path in list_checkpoints(tmp_path / "b")] == ["step-000004"]
    second.start().wait(60)
    straight = tiny(other, run_dir="c").start().wait(60)
    rows = [row["loss"] for row in straight.log.of("step")][4:]
    assert [row["loss"] for row in second.log.of("step")] == rows
    ours, theirs = _weights(second.result_dir), _weights(straight.result_dir)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_upload_without_its_manifest_is_not_taken_for_a_whole_one(tmp_path, url):
    _upload_one(tmp_path, url, step=1, text=b"one")
    _upload_one(tmp_path, url, step=2, text=b"two")
    store, root = fsspec.core.url_to_fs(url)
    store.rm_file(f"{root}/run/checkpoints/step-000002/manifest.json")
    fetched = fetch_run(url, tmp_path / "fetched")
    assert [path.name for path in list_checkpoints(fetched)] == ["step-000001"]
    assert (fetched / "checkpoints/step-000001/model.safetensors").read_bytes() == b"one"


def test_a_damaged_upload_gives_way_to_an_older_one(tmp_path, url, caplog):
    _upload_one(tmp_path, url, step=1, text=b"one")
    _upload_one(tmp_path, url, step=2, text=b"two")
    store, root = fsspec.core.url_to_fs(url)
    store.pipe_file(f"{root}/run/checkpoints/step-000002/model.safetensors", b"tw0")
    assert [path.name for path in list_checkpoints(fetch_run(url, tmp_path / "fetched"))] == ["step-000001"]
    assert "step-000002/model.safetensors is not what was uploaded" in caplog.text


def test_names_of_a_manifest_cannot_leave_the_run_folder(tmp_path, url):
    _upload_one(tmp_path, url)
    store, root = fsspec.core.url_to_fs(url)
    path = f"{root}/run/checkpoints/step-000001/manifest.json"
    manifest = json.loads(store.cat_file(path))
    manifest["files"]["../../../evil"] = manifest["files"]["model.safetensors"]
    store.pipe_file(path, json.dumps(manifest).encode())
    with pytest.raises(RunFolderError, match="no whole checkpoint"):
        fetch_run(url, tmp_path / "fetched")


def test_older_uploads_are_deleted_and_left_over_ones_too(tmp_path, url):
    store, root = fsspec.core.url_to_fs(url)
    store.pipe_file(f"{root}/run/.uploading-dead/model.safetensors", b"half")
    for step in (1, 2, 3):
        _upload_one(tmp_path, url, step=step, keep=2)
    assert {path.split("/")[3] for path in _files(url)} == {"step-000002", "step-000003"}


def test_files_deleted_after_the_event_are_still_uploaded(tmp_path, url, monkeypatch):
    import shutil

    send = upload_module.Uploader._send

    def late(self, bundle):
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        send(self, bundle)

    monkeypatch.setattr(upload_module.Uploader, "_send", late)
    assert "Uploaded" in _upload_one(tmp_path, url, text=b"gone")[-1]
    assert (fetch_run(url, tmp_path / "b") / "checkpoints/step-000001/model.safetensors").read_bytes() == b"gone"


def test_a_store_that_fails_never_ends_a_run(tiny, url, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    def fail(*args, **kwargs):
        raise OSError("the network is down")

    monkeypatch.setattr(MemoryFileSystem, "open", fail)
    session = tiny(small_recipe(training__max_steps=2, training__upload_to=url)).start().wait(60)
    assert session.state == "done"
    assert session.result_dir is not None
    assert "OSError: the network is down" in _logs(session)
    assert _files(url) == []


def test_a_stopped_run_is_uploaded_before_it_ends(tiny, tmp_path, gate, url):
    recipe = small_recipe(training__upload_to=url, training__gradient_accumulation_steps=1, evaluation__split="none")
    session = tiny(recipe, prepare=gate.install).start()
    gate.let(3)
    gate.await_arrival(4)
    session.stop()
    gate.let(1)
    session.wait(60)
    assert session.state == "stopped"
    names = [path.name for path in list_checkpoints(fetch_run(url, tmp_path / "elsewhere"))]
    assert names == [path.name for path in list_checkpoints(session.run_dir)]
    assert len(names) == 1


@pytest.mark.parametrize(
    "secret", ["s3://KEY:hid/den@bucket/runs", "abfs://box@store/runs?sig=hidden", "sftp://me:hidden@host/runs"]
)
def test_credentials_in_a_url_are_refused_and_not_repeated(secret, tmp_path):
    for attempt in (
        lambda: Recipe().with_changes({"training.upload_to": secret}),
        lambda: Recipe.from_dict({"training": {"upload_to": secret}}),
        lambda: fetch_run(secret, tmp_path / "run"),
    ):
        with pytest.raises(RecipeError, match="the URL holds") as caught:
            attempt()
        assert "hid" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_an_unknown_kind_of_url_is_refused_before_the_run_begins(tiny, tmp_path):
    session = tiny(small_recipe(training__upload_to="nowhere://bucket"))
    with pytest.raises(RecipeError, match="nowhere://bucket cannot be opened"):
        session.start()
    assert not (tmp_path / "run").exists()


def test_a_plain_path_is_no_url():
    with pytest.raises(RecipeError, match="file:///mnt/runs"):
        Recipe().with_changes({"training.upload_to": "/mnt/runs"})


def test_an_empty_url_says_what_to_give(url, tmp_path):
    with pytest.raises(RunFolderError, match=r"what training\.upload_to was"):
        fetch_run(url, tmp_path / "run")


def test_an_existing_folder_is_not_written_to(tmp_path, url):
    _upload_one(tmp_path, url)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="exists and is not empty"):
        fetch_run(url, tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
