"""A run with everything attached: what is on disk, in memory and in the doctors' words is the same run."""

import json
from pathlib import Path

import pytest

from workbench.events import Event
from workbench.observe.history import History
from workbench.pipeline import start_session
from workbench.pipeline.run import WatchedSession
from workbench.recipe import Recipe
from workbench.units import MIB


@pytest.fixture
def recipe() -> Recipe:
    return Recipe().with_changes(
        {
            "model.name_or_path": "tiny-llama",
            "data.max_length": 64,
            "data.max_rows": 64,
            "evaluation.max_rows": 4,
            "training.max_steps": 12,
            "training.gradient_accumulation_steps": 1,
            "hardware.device": "cpu",
        }
    )


class Seen:
    """An Observer that keeps the kinds of what it sees."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


def test_history_files_and_summary_tell_the_same_run(recipe: Recipe, tmp_path: Path) -> None:
    seen = Seen()
    session = start_session(recipe, run_dir=tmp_path / "run", observers=[seen]).wait()
    assert session.state == "done"
    steps = [event.data for event in seen.events if event.kind == "step"]
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert session.history.column("loss").tolist() == [row["loss"] for row in steps]
    read_back = History.from_folder(tmp_path / "run")
    assert read_back.column("loss").tolist() == session.history.column("loss").tolist()
    assert Recipe.from_yaml(tmp_path / "run" / "recipe.yaml") == recipe
    summary = json.loads(json.dumps(session.summary()))
    assert summary["num_steps_done"] == 12 and summary["state"] == "done"
    assert summary["result_dir"].endswith("adapter")
    assert "Watched: " in summary["verdicts"][0]
    assert summary["findings"] == []


def test_a_leak_is_told_once_and_written_down(recipe: Recipe, tmp_path: Path) -> None:
    """The doctors read the history; a history that grows by 8 MiB a step must reach the file, once."""
    from workbench.hardware import read_device
    from workbench.observe.meters import CpuMeter

    told = Seen()
    meter = CpuMeter()
    session = WatchedSession(recipe, device=read_device("cpu"), meter=meter, observers=[told], run_dir=tmp_path)
    for step in range(1, 101):
        row = {"step": step, "step_s": 0.1, "loss": 3 - step / 100, "grad_norm": 1.0, "allocated_bytes": 8 * MIB * step}
        session.publish(Event("step", row))
    session.publish(Event("state", {"state": "running"}))
    leaks = [event for event in told.events if event.data.get("kind") == "leak"]
    assert len(leaks) == 1
    assert leaks[0].data["evidence"]["bytes_per_step"] == pytest.approx(8 * MIB, rel=0.05)
    assert len((tmp_path / "findings.jsonl").read_text().splitlines()) == 1
    assert session.leak_verdict().verdict == "leak"
