"""Out of memory on an emulated card: explained, mended with one call, and ended as a run that fitted from its start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.oom_rounds import KINDS, play_round
from workbench import Recipe, Workbench
from workbench.errors import RecipeError, RunError
from workbench.hardware import read_device
from workbench.pipeline import start_session, try_worst_batch
from workbench.recipe import find_problems

FULL = {
    "model.name_or_path": "tiny-llama",
    "data.max_length": 256,
    "data.max_rows": 48,
    "evaluation.max_rows": 4,
    "training.max_steps": 2,
    "training.per_device_train_batch_size": 8,
    "training.gradient_accumulation_steps": 1,
    "hardware.device": "cpu",
    "hardware.emulate": "Tesla T4:210MiB",
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", [0])
def test_a_round_gives_memory_back_and_the_same_weights(number: int, tmp_path: Path) -> None:
    """One round of the benchmark, which plays twenty of four kinds."""
    entry = play_round(number, tmp_path)
    assert entry.kind == list(KINDS)[number]
    assert entry.step > 0 and entry.num_tries == 1
    assert entry.phase == ("evaluation" if "evaluation" in entry.kind else entry.phase)
    assert entry.is_good, entry


def test_the_finding_says_where_and_what_fits(tmp_path: Path) -> None:
    recipe = Recipe().with_changes(FULL)
    session = start_session(recipe, run_dir=tmp_path / "run")
    with pytest.raises(RunError, match="activations are"):
        session.wait()
    finding = next(one for one in session.findings if one.kind == "oom")
    assert finding.where["phase"] in ("forward", "loss", "backward") and finding.where["step"] == 0
    evidence = finding.evidence
    assert evidence["requested_bytes"] > 0 and finding.where["op"].startswith("aten.")
    names = ("parameter", "activation", "workspace", "context")
    assert all(evidence[f"{name}_bytes"] > 0 for name in names)
    assert evidence["parameter_bytes"] == evidence["predicted_parameter_bytes"]
    assert evidence["needed_bytes"] > 0.9 * evidence["limit_bytes"] and evidence["predicted_bytes"] > 0
    remedies = session.remedies()
    assert remedies and all(fix.predicted_peak_bytes < evidence["limit_bytes"] for fix in remedies)
    assert all(fix.predicted_step_s > 0 for fix in remedies)
    for fix in remedies:
        changed = recipe.with_changes(fix.changes)
        assert changed.training.effective_batch_size == recipe.training.effective_batch_size
        assert not any(path.startswith("evaluation.") for path in fix.changes)
        # The card is played by this machine, which must be able to run what is offered.
        assert not find_problems(changed, read_device("cpu").facts(for_estimate=False))
    written = [json.loads(line) for line in (tmp_path / "run" / "findings.jsonl").read_text().splitlines()]
    assert [line["data"]["cause"] for line in written] == [finding.cause]
    with pytest.raises(RecipeError, match="samples per optimizer step"):
        session.continue_with({"training.gradient_accumulation_steps": 2})


def test_the_dry_step_finds_it_before_the_run_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = Recipe().with_changes(FULL)
    report = try_worst_batch(recipe)
    assert not report.fits and report.finding is not None and report.finding.fixes[0].changes
    roomy = try_worst_batch(recipe.with_changes({"hardware.emulate": "Tesla T4:300MiB"}))
    assert roomy.fits and roomy.finding is None
    assert roomy.measured_bytes == pytest.approx(roomy.predicted_bytes, rel=0.1)
    assert roomy.num_tokens == 8 * 256
    assert list(tmp_path.iterdir()) == []


def test_one_click_applies_and_goes_on(tmp_path: Path) -> None:
    panel = Workbench(Recipe().with_changes(FULL), run_root=tmp_path)
    try:
        panel.start()
        with pytest.raises(RunError):
            panel.wait()
        view = panel._train.remedies
        assert view.remedies and "at the failure" in panel._train._findings.value
        changes = {"training.gradient_checkpointing": True, "training.loss_type": "chunked_nll"}
        session = panel.continue_with(changes)
        assert panel.wait().state == "done" and session.step == 2
        assert panel.recipe.training.gradient_checkpointing and panel.recipe == session.recipe
        assert not view.remedies
    finally:
        panel.close()
