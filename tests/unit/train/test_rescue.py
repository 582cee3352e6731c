"""A run that ran out of memory goes on from its last good step and ends as if it never had."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from workbench.errors import RunError
from workbench.train.rescue import fingerprint
from workbench.train.run_folder import list_checkpoints

from .parts import small_recipe


def full():
    """Raise what a GPU raises."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fail_at(run, pass_number: int, *, training: bool):
    """Make the forward pass of that number run out of memory, of training or of evaluation, once."""
    seen = [0]

    def hook(module, args):
        if module.training is training:
            seen[0] += 1
            if seen[0] == pass_number:
                full()

    run.model.register_forward_pre_hook(hook)


def weights(session):
    return load_file(session.result_dir / "adapter_model.safetensors")


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def fail(session):
    with pytest.raises(RunError, match="ut of memory"):
        session.start().wait()
    assert session.state == "failed"
    return session


def test_nothing_is_lost_in_the_middle_of_a_step(tiny, tmp_path):
    """Two micro-steps a step: the sixth is the second of step 3. Dropout shows whether the random state is right."""
    recipe = small_recipe(adapter__lora_dropout=0.3, training__warmup_steps=2)
    whole = tiny(recipe, run_dir="whole").start().wait()
    first = fail(tiny(recipe, prepare=lambda run: fail_at(run, 6, training=True)))
    assert first.rescued == "The state after step 2 is saved: nothing is lost."
    assert [path.name for path in list_checkpoints(first.run_dir)] == ["step-000002"]
    changed = recipe.with_changes({"training.gradient_checkpointing": True})
    second = tiny(changed, run_dir=None, resume_from=first.run_dir).start().wait()
    steps = [row["step"] for row in (*first.log.of("step"), *second.log.of("step"))]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert same(weights(whole), weights(second))


@pytest.mark.parametrize("at_step", [2, 6])
def test_an_evaluation_that_ran_out_is_made_when_the_run_goes_on(tiny, at_step):
    """Also after the last step, when nothing else is left to do."""
    changes = {"evaluation__eval_steps": 2, "adapter__lora_dropout": 0.3, "evaluation__load_best_model_at_end": True}
    recipe = small_recipe(**changes)
    whole = tiny(recipe, run_dir="whole").start().wait()
    passes_per_evaluation = 2  # six rows, four at a time
    number = passes_per_evaluation * (at_step // 2 - 1) + 1
    first = fail(tiny(recipe, prepare=lambda run: fail_at(run, number, training=False)))
    assert "eval_loss" not in first.log.of("step")[-1]
    smaller = recipe.with_changes({"evaluation.per_device_eval_batch_size": 2})
    second = tiny(smaller, run_dir=None, resume_from=first.run_dir).start().wait()
    expected = {row["step"]: row["eval_loss"] for row in whole.log.of("step") if "eval_loss" in row}
    found = {row["step"]: row["eval_loss"] for row in second.log.of("step") if "eval_loss" in row}
    assert set(found) == {step for step in expected if step >= at_step}
    # Sums over other batches: equal up to the rounding of float32.
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-5)
    assert same(weights(whole), weights(second))


def test_a_half_made_update_is_not_saved(tiny):
    """Some weights would be those of a step that never ended: the run goes back to the checkpoint before."""
    recipe = small_recipe(training__save_steps=2, training__optim="adamw_torch")
    whole = tiny(recipe, run_dir="whole").start().wait()

    def half_way(run):
        optimizer, made = run.optimizer, [0]
        step = optimizer.step

        def broken(*args, **kwargs):
            made[0] += 1
            if made[0] == 4:
                with torch.no_grad():
                    next(p for p in run.model.parameters() if p.grad is not None).mul_(2.0)
                full()
            return step(*args, **kwargs)

        optimizer.step = broken

    first = fail(tiny(recipe, prepare=half_way))
    assert [path.name for path in list_checkpoints(first.run_dir)] == ["step-000002"]
    assert first.rescued == "The run goes on from step-000002; the steps after it come again as they were."
    second = tiny(recipe, run_dir=None, resume_from=first.run_dir).start().wait()
    assert same(weights(whole), weights(second))


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adafactor", "lion_8bit"])
def test_an_update_shows_in_the_fingerprint(name):
    from workbench.components.optimizer import build_optimizer

    model = torch.nn.Linear(8, 8)
    optimizer = build_optimizer(small_recipe(training__optim=name), model)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        before = fingerprint(optimizer)
        assert fingerprint(optimizer) == before
        optimizer.step()
        assert fingerprint(optimizer) != before


def test_another_optimizer_begins_anew_and_the_rest_goes_on(tiny):
    recipe = small_recipe(training__lr_scheduler_type="cosine")
    first = fail(tiny(recipe, prepare=lambda run: fail_at(run, 6, training=True)))
    changed = recipe.with_changes({"training.optim": "adamw_bnb_8bit"})
    second = tiny(changed, run_dir=None, resume_from=first.run_dir).start().wait()
    assert any("state begins anew" in data["message"] for data in second.log.of("log"))
    whole = tiny(recipe, run_dir="whole").start().wait()
    rates = [row["learning_rate"] for row in whole.log.of("step")]
    assert [row["learning_rate"] for row in second.log.of("step")] == rates[2:]


def test_a_smaller_micro_batch_keeps_the_order_of_the_data(tiny):
    """Also where samples are grouped by length, and where the last step of an epoch is short (22 samples)."""
    changes = {"data__group_by_length": True, "training__max_steps": 8, "training__per_device_train_batch_size": 4}
    recipe = small_recipe(**changes, training__gradient_accumulation_steps=1)
    whole = tiny(recipe, run_dir="whole").start().wait()
    first = fail(tiny(recipe, prepare=lambda run: fail_at(run, 4, training=True)))
    smaller = {"training.per_device_train_batch_size": 1, "training.gradient_accumulation_steps": 4}
    second = tiny(recipe.with_changes(smaller), run_dir=None, resume_from=first.run_dir).start().wait()
    expected, found = whole.log.of("step")[3:], second.log.of("step")
    for name in ("step", "num_tokens", "num_supervised_tokens"):
        assert [row[name] for row in found] == [row[name] for row in expected]
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-4)
    assert found[-1]["num_padding_tokens"] == 0
