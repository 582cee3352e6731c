"""Traces on disk are the traces that were made; what is broken, foreign or switched off is traced anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workbench.estimate import clear_caches, estimate_run, run, store
from workbench.estimate.estimate import Estimate
from workbench.hardware import find_device
from workbench.recipe import Recipe

DEVICE = find_device("Tesla T4")
RECIPE = Recipe().with_changes({"model.name_or_path": "tiny-llama", "data.max_length": 64})


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WORKBENCH_TRACES", str(tmp_path / "traces"))
    clear_caches()
    yield
    clear_caches()


def _files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "traces").glob("*"))


def _in_new_process(monkeypatch: pytest.MonkeyPatch, recipe: Recipe = RECIPE) -> tuple[Estimate, int]:
    """Return the estimate with nothing in memory, and how often the model was traced."""
    clear_caches()
    traces: list[Any] = []
    original = run.trace_run
    with monkeypatch.context() as patch:
        patch.setattr(run, "trace_run", lambda *args, **named: (traces.append(1), original(*args, **named))[1])
        return estimate_run(recipe, DEVICE), len(traces)


def test_a_new_process_finds_the_trace_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, num_first = _in_new_process(monkeypatch)
    second, num_second = _in_new_process(monkeypatch)
    assert (num_first, num_second) == (1, 0)
    assert second.was_cached and not first.was_cached
    assert replace(second, elapsed_s=0, was_cached=False) == replace(first, elapsed_s=0)
    assert len(_files(tmp_path)) == 1


def test_a_tape_comes_back_equal(tmp_path: Path) -> None:
    estimate_run(RECIPE, DEVICE)
    traced = next(iter(run._LIVES.values()))
    found = store.load_trace(_files(tmp_path)[0])
    assert found is not None
    assert found.tape == traced.life.tape
    assert found.counts == (traced.num_parameters, traced.num_trainable, traced.trainable_elements)


def test_a_broken_file_is_traced_again_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = _in_new_process(monkeypatch)
    path = _files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:1000])
    second, num_traces = _in_new_process(monkeypatch)
    assert num_traces == 1
    assert second.memory == first.memory
    assert store.load_trace(_files(tmp_path)[0]) is not None


def test_a_changed_config_behind_the_same_path_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    text = (
        '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 99}'
    )
    config.write_text(text)
    recipe = RECIPE.with_changes({"model.name_or_path": str(config)})
    first, _ = _in_new_process(monkeypatch, recipe)
    config.write_text(text.replace("96", "192"))
    second, num_traces = _in_new_process(monkeypatch, recipe)
    assert num_traces == 1
    assert second.num_parameters > first.num_parameters


def test_other_software_is_another_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.trace_path(RECIPE, "key")
    monkeypatch.setattr(store, "_software", lambda: "a newer torch")
    assert store.trace_path(RECIPE, "key") != before


def test_models_that_may_change_unseen_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    of_hub = RECIPE.with_changes({"model.name_or_path": "someone/some-model"})
    with_code = RECIPE.with_changes({"model.trust_remote_code": True})
    assert store.trace_path(of_hub, "key") is None
    assert store.trace_path(with_code, "key") is None
    monkeypatch.setenv("WORKBENCH_TRACES", "")
    assert store.trace_path(RECIPE, "key") is None


def test_the_folder_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate_run(RECIPE, DEVICE)
    stored = store.load_trace(_files(tmp_path)[0])
    assert stored is not None
    monkeypatch.setattr(store, "MAX_FILES", 2)
    for name in "abc":
        store.save_trace(tmp_path / "traces" / f"{name}.npz", stored)
    assert len(_files(tmp_path)) == 2
    assert (tmp_path / "traces" / "c.npz").is_file()


def test_a_folder_that_cannot_be_written_keeps_nothing_and_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("WORKBENCH_TRACES", str(blocked / "traces"))
    assert estimate_run(RECIPE, DEVICE).memory.process_bytes > 0
