"""A resumed run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import pytest
import torch

from workbench.errors import RunError, RunFolderError
from workbench.train.run_folder import list_checkpoints

from .parts import small_recipe

COMPARED = ("step", "epoch", "loss", "grad_norm", "learning_rate", "num_tokens", "eval_loss")

CASES = {
    "middle of an epoch": ({}, 2),
    "end of an epoch": ({"training__gradient_accumulation_steps": 1, "training__max_steps": 14}, 11),
    "dropout": ({"adapter__lora_dropout": 0.3, "training__lr_scheduler_type": "cosine"}, 3),
    "grouped by length": ({"data__group_by_length": True, "training__max_steps": 9}, 7),
    "balanced by length": ({"data__sampling": "balanced_length", "training__max_steps": 9}, 7),
    "with evaluations": ({"evaluation__eval_steps": 2, "training__warmup_steps": 4}, 3),
    "8-bit states": ({"training__optim": "adamw_bnb_8bit"}, 3),
    "lion": ({"training__optim": "lion_8bit"}, 3),
    "adafactor": ({"training__optim": "adafactor"}, 3),
    "all weights": ({"adapter__method": "none"}, 3),
    "bottlenecks": ({"adapter__method": "bottleneck", "adapter__modules_to_save": ("lm_head",)}, 3),
    "pruned before": ({"adapter__method": "none", "pruning__method": "l1_global", "training__weight_decay": 0.1}, 3),
    "pruned after the checkpoint": (
        {"adapter__method": "none", "pruning__method": "structured", "pruning__step": 3},
        3,
    ),
    "pruned base": ({"pruning__method": "l1_global", "pruning__step": 2}, 3),
    "4-bit base": ({"quantization__load_in_4bit": True}, 3),
    "dora and a whole head": ({"adapter__use_dora": True, "adapter__modules_to_save": ("lm_head",)}, 3),
}


def _rows(log):
    return [{name: row.get(name) for name in COMPARED} for row in log.of("step")]


def _weights(session):
    from safetensors.torch import load_file

    name = "adapter_model.safetensors" if session.result_dir.name == "adapter" else "model.safetensors"
    return load_file(session.result_dir / name)


@pytest.mark.parametrize("case", CASES)
def test_resumed_equals_uninterrupted(tiny, tmp_path, case):
    changes, stop_at = CASES[case]
    recipe = small_recipe(**changes)
    whole = tiny(recipe, run_dir="whole").start().wait()
    assert whole.state == "done"
    first = tiny(recipe.with_changes({"training.save_steps": stop_at}), run_dir="parts")
    first.start().wait()
    checkpoint = tmp_path / "parts" / "checkpoints" / f"step-{stop_at:06d}"
    second = tiny(recipe, run_dir="rest", resume_from=checkpoint).start().wait()
    assert _rows(second.log) == _rows(whole.log)[stop_at:]
    expected, found = _weights(whole), _weights(second)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("micro_steps", [3, 4])
def test_a_stop_inside_a_step_resumes_from_its_border(tiny, gate, micro_steps):
    """With two micro-steps a step, the third is in the middle of step 2 and the fourth at its end."""
    recipe = small_recipe(adapter__lora_dropout=0.3)
    whole = tiny(recipe, run_dir="whole").start().wait()
    first = tiny(recipe, prepare=gate.install, run_dir="parts").start()
    gate.let(micro_steps - 1)
    gate.await_arrival(micro_steps)
    first.stop(save=True)
    gate.let()
    assert first.wait().state == "stopped"
    done = micro_steps // 2
    assert first.step == done
    assert [path.name for path in list_checkpoints(first.run_dir)] == [f"step-{done:06d}"]
    second = tiny(recipe, run_dir=None, resume_from=first.run_dir).start().wait()
    assert second.run_dir == first.run_dir
    assert _rows(second.log) == _rows(whole.log)[done:]
    expected, found = _weights(whole), _weights(second)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_time_and_patience_go_on_after_a_resume(tiny):
    recipe = small_recipe(training__save_steps=3)
    first = tiny(recipe).start().wait()
    checkpoint = list_checkpoints(first.run_dir)[0]
    second = tiny(recipe, run_dir="rest", resume_from=checkpoint).start().wait()
    assert second.log.of("step")[0]["elapsed_s"] > first.log.of("step")[2]["elapsed_s"]


def test_nothing_to_resume_is_one_sentence(tiny, tmp_path):
    with pytest.raises(RunFolderError, match="no run folder"):
        tiny(small_recipe(), run_dir=None, resume_from=tmp_path)
    folder = tiny(small_recipe(training__max_steps=2)).start().wait().run_dir
    for path in list_checkpoints(folder):
        path.rename(path.with_name("gone"))
    with pytest.raises(RunFolderError, match="no checkpoint"):
        tiny(small_recipe(), run_dir=None, resume_from=folder)


def test_another_adapter_cannot_continue_a_run(tiny):
    folder = tiny(small_recipe(training__max_steps=2)).start().wait().run_dir
    other = tiny(small_recipe(adapter__target_modules=("q_proj",)), run_dir=None, resume_from=folder).start()
    with pytest.raises(RunError, match="another model or adapter"):
        other.wait()


def test_a_damaged_checkpoint_is_one_sentence(tiny):
    folder = tiny(small_recipe(training__max_steps=2)).start().wait().run_dir
    (list_checkpoints(folder)[-1] / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(RunError, match="cannot be read"):
        tiny(small_recipe(), run_dir=None, resume_from=folder).start().wait()
