"""The environment in words, and the bundle: whole, readable, and without what it must not hold."""

import json
import zipfile
from pathlib import Path

import pytest

from workbench import Recipe, write_bug_report
from workbench.cli.main import main
from workbench.errors import WorkbenchError
from workbench.pipeline import bug_report
from workbench.pipeline.bug_report import read_environment
from workbench.pipeline.masking import Mask

MASK = Mask(secrets=["opensesame"], users=["anna"])


def contents(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def a_run(folder: Path) -> Path:
    folder.mkdir()
    recipe = Recipe().with_changes({"data.name_or_path": "/data/anna/chats.jsonl"})
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    (folder / "metrics.jsonl").write_text('{"loss": 1.0}\n')
    events = [
        {"kind": "state", "data": {"state": "failed", "error": "no access with opensesame"}},
        {"kind": "spike", "data": {"rows": ["my private diary"]}},
        {"kind": "finding", "data": {"cause": "loss.spikes", "summary": "row 'my private diary'", "where": {
            "step": 3, "text": "my private diary"}, "evidence": {"loss": 9.5, "text": "my private diary"}}},
    ]  # fmt: skip
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + "{broken\n")
    return folder


def test_the_environment_names_versions_devices_and_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("HF_TOKEN", "a-secret-value")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    found = read_environment(MASK)
    assert found.packages["torch"] == torch.__version__
    assert any(line.startswith("CPU (") for line in found.devices)
    assert found.variables["HF_TOKEN"] == "[secret]" and found.variables["HF_HUB_OFFLINE"] == "1"
    assert found.variables["TOKENIZERS_PARALLELISM"] == "false"
    text = str(found)
    assert f"torch {torch.__version__}" in text and "free)" in text and "a-secret-value" not in text


def test_old_and_missing_packages_and_folders_that_cannot_be_used_are_problems(monkeypatch, tmp_path) -> None:
    versions = {"torch": "2.1.0", "transformers": "99.0"}
    monkeypatch.setattr(bug_report, "_version", versions.get)
    monkeypatch.setattr(
        bug_report.importlib.metadata, "requires", lambda name: ["torch>=2.9", "transformers>=5", "gguf>=0.17"]
    )
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(bug_report.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**20})())
    problems = read_environment(MASK).problems
    assert [text.split(".")[0] for text in problems[:2]] == ["torch 2", "gguf is not installed"]
    assert 'pip install "torch>=2.9"' in problems[0]
    assert any("cache folder" in text and "1 MiB left" in text for text in problems)


def test_the_bundle_tells_how_a_run_went_and_no_word_of_its_data(tmp_path: Path) -> None:
    path = write_bug_report(tmp_path / "bundle.zip", run_dir=a_run(tmp_path / "run"), mask=MASK)
    files = contents(path)
    assert set(files) == {"README.txt", "report.txt", "report.json", "run/recipe.yaml", "run/events.jsonl"}
    everything = "\n".join(files.values())
    assert "opensesame" not in everything and "diary" not in everything and "anna" not in everything
    assert Recipe.from_yaml(files["run/recipe.yaml"]).data.name_or_path == "/data/[user]/chats.jsonl"
    state, finding = map(json.loads, files["run/events.jsonl"].splitlines())
    assert state["data"]["error"] == "no access with [secret]"
    assert finding["data"] == {"cause": "loss.spikes", "where": {"step": 3}, "evidence": {"loss": 9.5}}
    assert json.loads(files["report.json"])["packages"]["torch"]


def test_a_bundle_overwrites_nothing_and_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there.zip").write_text("mine")
    with pytest.raises(WorkbenchError, match="exists already"):
        write_bug_report(tmp_path / "there.zip", mask=MASK)
    assert (tmp_path / "there.zip").read_text() == "mine"
    with pytest.raises(WorkbenchError, match=r"no recipe\.yaml"):
        write_bug_report(tmp_path / "new.zip", run_dir=tmp_path, mask=MASK)
    assert not (tmp_path / "new.zip").exists()


def test_the_command_line_prints_writes_and_explains_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["packages"]["torch"]
    assert main(["doctor", "--run", str(tmp_path)]) == 2
    assert "--bundle" in capsys.readouterr().out
    assert main(["doctor", "--bundle", str(tmp_path / "b.zip"), "--run", str(a_run(tmp_path / "r"))]) == 0
    assert "Look through it" in capsys.readouterr().out
    assert "run/recipe.yaml" in contents(tmp_path / "b.zip")
