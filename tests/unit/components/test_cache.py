from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from workbench.components.cache import build_once, cache_dir, locked
from workbench.errors import Cancelled, ModelError
from workbench.events import Cancel


def test_cache_dir_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "one"))
    assert cache_dir() == tmp_path / "one"
    monkeypatch.delenv("WORKBENCH_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "workbench"


def test_failed_build_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    target = tmp_path / "models" / "x"

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise Cancelled("stop")

    with pytest.raises(Cancelled):
        build_once(target, fail, ModelError)
    assert [path.name for path in target.parent.iterdir() if not path.name.endswith(".lock")] == []
    build_once(target, lambda folder: (folder / "whole").write_text("whole") and None, ModelError)
    assert (target / "whole").read_text() == "whole"


def test_two_builders_build_once(tmp_path: Path) -> None:
    target, builds = tmp_path / "x", []

    def build(folder: Path) -> None:
        builds.append(folder)
        time.sleep(0.1)
        (folder / "done").touch()

    threads = [threading.Thread(target=build_once, args=(target, build, ModelError)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert (target / "done").exists()


def test_full_disk_becomes_the_error_of_the_caller(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match=r"cannot be written \(No space left on device\).*WORKBENCH_CACHE"):
        build_once(tmp_path / "x", full, ModelError)


def test_waiting_for_a_lock_can_be_cancelled(tmp_path: Path) -> None:
    cancel = Cancel()
    cancel.set()
    with locked(tmp_path / "x"), pytest.raises(Cancelled), locked(tmp_path / "x", cancel=cancel):
        pass
