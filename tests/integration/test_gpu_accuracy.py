"""The GPU benchmark's whole way, on a CPU that pretends to be one; its records replay like those of a GPU would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_accuracy
from benchmarks.gpu_accuracy import CONFIGURATIONS, main, replay_events, small


def test_twenty_configurations_with_names_of_their_own() -> None:
    assert len({item.name for item in CONFIGURATIONS}) == len(CONFIGURATIONS) == 20


@pytest.mark.parametrize("item", CONFIGURATIONS, ids=lambda item: item.name)
def test_every_configuration_makes_a_recipe(item: gpu_accuracy.Configuration) -> None:
    assert item.recipe().data.max_length == item.length
    assert small(item).recipe().training.mixed_precision == "no"


def test_a_dry_run_stores_a_record_whose_events_give_its_peaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process: starting another one for each configuration is what the timeout of a hung GPU needs.
    monkeypatch.setattr(gpu_accuracy, "_run_child", lambda item, is_dry: gpu_accuracy.run_one(item, is_dry))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert main(["--dry-run", "--only", "lora-checkpointing", "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(before)
    assert "allocated: mean" in capsys.readouterr().out
    record = json.loads((tmp_path / "lora-checkpointing.json").read_text(encoding="utf-8"))
    stats = replay_events(record["events"], expandable_segments=record["expandable_segments"])
    assert stats.peak_allocated == record["measured"]["peak_allocated_bytes"]
    assert stats.peak_reserved == record["measured"]["peak_reserved_bytes"]
    assert record["predicted"]["peak_allocated_bytes"] == pytest.approx(stats.peak_allocated, rel=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure the GPU here")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    assert "No NVIDIA GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
