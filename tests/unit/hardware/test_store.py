from __future__ import annotations

from pathlib import Path

import pytest

from workbench.hardware.store import Profile, cache_dir, load_profile, profile_path, save_profile

PROFILE = Profile("CPU (a/b, 2 cores)", "2.13.0", 2, 1e10, {"float32": 1e11}, 5e-6, {"attention": 0.5})


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))


def test_a_profile_is_read_back() -> None:
    path = save_profile(PROFILE)
    assert path is not None
    assert path.parent == cache_dir() / "profiles"
    assert load_profile(PROFILE.device_name, "2.13.0", 2) == PROFILE
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_another_version_or_number_of_threads_has_its_own() -> None:
    save_profile(PROFILE)
    assert load_profile(PROFILE.device_name, "2.14.0", 2) is None
    assert load_profile(PROFILE.device_name, "2.13.0", 1) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 0}', '{"version": 1, "odd": 2}'])
def test_a_broken_or_old_file_is_no_profile(text: str) -> None:
    path = profile_path(PROFILE.device_name, "2.13.0", 2)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    assert load_profile(PROFILE.device_name, "2.13.0", 2) is None


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    monkeypatch.setenv("WORKBENCH_CACHE", str(blocked))
    assert save_profile(PROFILE) is None
