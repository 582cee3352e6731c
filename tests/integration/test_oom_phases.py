"""Out of memory outside forward and backward: while loading, in the optimizer, in resuming and in saving.

The emulated card is made so small that just that phase has no room; the finding names it and memory comes back.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench import Recipe
from workbench.errors import RunError
from workbench.hardware import read_device
from workbench.observe.graph_nodes import live_tensors
from workbench.observe.meters import choose_meter
from workbench.pipeline import remedies, start_session
from workbench.pipeline.run import WatchedSession

MAX_KEPT_BYTES = 1024  # Libraries keep a few constants from their first use on; the model alone has 1.1 MiB.


@pytest.fixture(autouse=True)
def few_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would fit is looked for and tested elsewhere; here it is only time."""
    monkeypatch.setattr(remedies, "BUDGET", 1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """All weights of tiny-llama on one short row a step: what is left are weights, gradients and optimizer state."""
    rows = [{"text": " ".join(f"word{(7 * row + place) % 89}" for place in range(6))} for row in range(12)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return Recipe().with_changes(
        {
            "model.name_or_path": "tiny-llama",
            "adapter.method": "none",
            "data.name_or_path": str(path),
            "data.format": "text",
            "data.max_length": 32,
            "evaluation.max_rows": 2,
            "training.max_steps": 1,
            "training.save_steps": 0,
            "training.per_device_train_batch_size": 1,
            "training.gradient_accumulation_steps": 1,
            "hardware.device": "cpu",
        }
    )


def card(recipe: Recipe, megabytes: int, **changes: Any) -> Recipe:
    """Return the settings for an emulated T4 with so much memory; its context alone takes 141 MiB."""
    return recipe.with_changes({"hardware.emulate": f"Tesla T4:{megabytes}MiB", **changes})


def live_bytes() -> int:
    gc.collect()
    real = [tensor for tensor in live_tensors() if tensor.device.type != "meta"]  # The estimator keeps its models.
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in real}.values())


def fails(session: WatchedSession, phase: str, cause: str, before: int) -> Any:
    """Wait for the failure; return its finding, which names the phase, with all memory given back."""
    with pytest.raises(RunError):
        session.wait()
    (finding,) = [one for one in session.findings if one.kind == "oom"]
    assert (finding.where["phase"], finding.cause) == (phase, cause), finding
    assert finding.evidence["requested_bytes"] > 0
    assert live_bytes() - before <= MAX_KEPT_BYTES
    return finding


def test_loading_runs_out(recipe: Recipe, tmp_path: Path) -> None:
    before = live_bytes()
    finding = fails(start_session(card(recipe, 162), run_dir=tmp_path / "a"), "load", "oom.weights", before)
    assert "while loading the model" in finding.summary
    smaller = start_session(card(recipe, 142), run_dir=tmp_path / "b")  # No room for cuBLAS's workspaces even.
    assert fails(smaller, "load", "oom.weights", before).evidence["requested_bytes"] >= 8 * 2**20


def test_the_optimizer_runs_out_while_it_makes_its_state(recipe: Recipe, tmp_path: Path) -> None:
    before = live_bytes()
    session = start_session(card(recipe, 166), run_dir=tmp_path / "run")
    finding = fails(session, "optimizer", "oom.optimizer_state", before)
    assert "AdamW is making its state (2.13 MiB)" in finding.summary
    assert "first optimizer step" in finding.evidence["new_facts"][0]


def test_resuming_on_a_smaller_card_runs_out(recipe: Recipe, tmp_path: Path) -> None:
    roomy = start_session(card(recipe, 168), run_dir=tmp_path / "first").wait()
    del roomy
    before = live_bytes()
    wanted = card(recipe, 163, **{"training.max_steps": 2})
    session = start_session(wanted, run_dir=tmp_path / "first", resume_from=tmp_path / "first")
    finding = fails(session, "resume", "oom.optimizer_state", before)
    assert finding.evidence["parameter_bytes"] > 1_000_000
    assert finding.evidence["optimizer_state_bytes"] > 0


class Gathering(WatchedSession):
    """Its model gathers its state on the device before it is written, as sharded models do."""

    def _build(self, device: Any) -> Any:
        run = super()._build(device)

        def gather(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            if self.step:
                state.update({name: torch.cat([value] * 6)[: len(value)] for name, value in state.items()})

        run.model.register_state_dict_post_hook(gather)
        return run


def test_saving_runs_out(recipe: Recipe, tmp_path: Path) -> None:
    before, here, settings = live_bytes(), read_device("cpu"), card(recipe, 168)
    meter = choose_meter(settings, here)
    session = Gathering(settings, device=here, meter=meter, run_dir=tmp_path / "run")
    session.start()
    finding = fails(session, "save", "oom.save", before)
    assert finding.where["step"] == 1 and finding.evidence["optimizer_state_bytes"] > 2_000_000
