"""The panel without a browser: what cells use, on a real tiny run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench import Recipe, Workbench
from workbench.errors import RecipeError, RunError, RunFolderError

TINY = {
    "model.name_or_path": "tiny-llama",
    "data.max_length": 64,
    "data.max_rows": 200,
    "training.max_steps": 30,
    "training.gradient_accumulation_steps": 1,
    "evaluation.split": "none",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def panel(tmp_path: Path) -> Iterator[Workbench]:
    made = Workbench(Recipe().with_changes(TINY), run_root=tmp_path)
    yield made
    if made.session is not None and hasattr(made.session, "stop"):
        made.session.stop(save=False)
        made.session.finished.wait(60)
    made.close()


def test_a_run_from_start_to_opened_folder(panel: Workbench, tmp_path: Path) -> None:
    bundle = panel._repr_mimebundle_()
    assert bundle["text/plain"].startswith("Fine-tuning panel:")
    session = panel.start()
    assert panel.wait() is session
    assert session.state == "done"
    assert session.run_dir.parent == tmp_path
    bundle = panel._repr_mimebundle_()
    assert bundle["text/plain"].startswith("Fine-tuning panel: done, step 30 of 30, loss ")
    assert bundle["text/html"].count("<svg") == 5
    assert "Saved in" in panel._train._result.value
    assert "Watched:" in panel._train._leak.value

    opened = Workbench.open(session.run_dir)
    assert opened.recipe == panel.recipe
    assert repr(opened).startswith("Fine-tuning panel: done, step 30 of 30")
    assert len(opened.session.history) == 30
    assert "adapter" in opened._train._result.value
    opened.close()


def test_a_measured_step_anchors_the_estimate_and_the_card_says_so(panel: Workbench) -> None:
    predicted = panel.wait_for_estimate()
    assert predicted.time.basis != "anchored"
    session = panel.start()
    panel.wait()
    steps = session.history.column("step_s")
    assert panel.estimate.time.basis == "anchored"
    assert min(steps) <= panel.estimate.time.step_s <= max(steps)
    assert panel.estimate.memory == predicted.memory
    assert "a step of this run was measured" in panel._estimate_view._picture.value


def test_a_second_run_is_refused_and_a_new_panel_attaches(panel: Workbench) -> None:
    panel.change({"training.max_steps": 3000})
    session = panel.start()
    with pytest.raises(RunError, match="one kernel trains one run"):
        panel.start()
    second = Workbench()
    assert second.session is session
    assert second.recipe == panel.recipe
    second._start_clicked()
    assert "The run was not started" in second._train.error.box.value
    second.stop(save=False)
    panel.wait()
    assert session.state == "stopped"
    second.close()


def test_problems_keep_a_run_from_starting(panel: Workbench) -> None:
    with pytest.raises(RecipeError, match="max_length"):
        panel.change({"data.max_length": 1})
    assert panel.recipe.data.max_length == 64
    with pytest.raises(RecipeError, match="max_length"):
        panel.start()
    panel.change({"data.max_length": 64, "adapter.method": "none", "quantization.load_in_4bit": True})
    with pytest.raises(RecipeError, match="adapter"):
        panel.start()
    assert panel.session is None


def test_commands_need_a_run(panel: Workbench) -> None:
    for command in (panel.pause, panel.resume, panel.stop, panel.wait):
        with pytest.raises(RunError, match="No run was started"):
            command()


def test_a_failed_run_says_so_in_words(panel: Workbench, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "<b>only a question</b>"}]}), encoding="utf-8")
    panel.change({"data.name_or_path": str(rows)})
    session = panel.start()
    with pytest.raises(RunError):
        panel.wait()
    box: Any = panel._train.error.box
    assert 'role="alert"' in box.value
    assert "The run failed" in box.value
    assert "Traceback, for a bug report" in box.value
    assert "<b>only a question</b>" not in box.value
    opened = Workbench.open(session.run_dir)
    assert "it has no message of the assistant" in opened._train.error.box.value
    assert "Traceback, for a bug report" in opened._train.error.box.value
    opened.close()
    assert "Fine-tuning panel: failed" in panel._repr_mimebundle_()["text/plain"]


def test_no_run_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run folder"):
        Workbench.open(tmp_path)


def test_the_estimate_follows_a_change(panel: Workbench) -> None:
    first = panel.wait_for_estimate(300)
    panel.change({"training.per_device_train_batch_size": 8})
    second = panel.wait_for_estimate(300)
    assert second.memory.peak_allocated_bytes > first.memory.peak_allocated_bytes
    assert second.recipe_digest == panel.recipe.digest()
    assert f'data-recipe="{panel.recipe.digest()}"' in panel._estimate_view._picture.value


def test_unknown_model_is_an_alert_and_leaves_the_panel_usable(panel: Workbench) -> None:
    panel.wait_for_estimate(300)
    panel.change({"model.name_or_path": "no such <model>"})
    with pytest.raises(RunError, match="There is no estimate"):
        panel.wait_for_estimate(60)
    shown = panel._estimate_view._error.box.value
    assert "no such &lt;model&gt;" in shown
    panel.change({"model.name_or_path": "tiny-llama"})
    assert panel.wait_for_estimate(300).memory.peak_allocated_bytes > 0
    assert panel._estimate_view._error.box.value == ""
