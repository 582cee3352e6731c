"""The loop: rows, accumulation, evaluation, NaN, early stopping, checkpoints."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch

from workbench.components.loss import compute_loss
from workbench.components.precision import Precision
from workbench.errors import NonFiniteError, RunFolderError
from workbench.train import engine as engine_module
from workbench.train.arguments import count_steps
from workbench.train.run_folder import list_checkpoints

from .parts import collate, small_recipe


def _trainable(run):
    return {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}


def _same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def test_rows_say_what_a_step_did(tiny):
    rows = tiny(small_recipe(training__warmup_steps=2)).start().wait(60).log.of("step")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["learning_rate"] for row in rows] == pytest.approx([0, 0.005, 0.01, 0.0075, 0.005, 0.0025])
    for row in rows:
        assert 0 < row["num_supervised_tokens"] < row["num_tokens"]
        assert row["tokens_per_s"] == pytest.approx(row["num_tokens"] / row["step_s"])
        assert "loss_scale" not in row
    assert rows[-1]["epoch"] == 1.0  # 11 batches make 5 steps of two and one of one.
    assert rows[2]["elapsed_s"] > rows[1]["elapsed_s"] > 0


def test_padding_is_counted(tiny):
    seen = []

    def prepare(run):
        collator = run.collator
        run.collator = lambda samples: seen.append(collator(samples)) or seen[-1]

    session = tiny(small_recipe(training__max_steps=1, evaluation__split="none"), prepare=prepare).start().wait(60)
    row = session.log.of("step")[0]
    total = sum(batch["input_ids"].numel() for batch in seen[:2])
    assert row["num_tokens"] + row["num_padding_tokens"] == total
    assert row["num_padding_tokens"] == sum(int((batch["attention_mask"] == 0).sum()) for batch in seen[:2])


def test_accumulation_is_the_large_batch(tiny):
    losses, weights = [], []
    for size, accumulation in ((4, 1), (1, 4)):
        kept = []
        recipe = small_recipe(
            training__per_device_train_batch_size=size,
            training__gradient_accumulation_steps=accumulation,
            training__optim="sgd",
        )
        session = tiny(recipe, run_dir=f"run{size}", prepare=kept.append, num_samples=24).start()
        session.wait(60)
        losses.append([row["loss"] for row in session.log.of("step")])
        weights.append(_trainable(kept[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-4, atol=1e-6)


def test_two_runs_with_one_seed_are_equal_and_another_seed_is_not(tiny):
    def losses(seed, name):
        session = tiny(small_recipe(training__seed=seed, adapter__lora_dropout=0.2), run_dir=name).start().wait(60)
        return [row["loss"] for row in session.log.of("step")]

    assert losses(1, "a") == losses(1, "b") != losses(2, "c")


def test_evaluation_is_the_mean_over_supervised_tokens(tiny):
    kept = []
    session = tiny(small_recipe(evaluation__eval_steps=4), prepare=kept.append).start().wait(60)
    evaluations = session.log.of("evaluation")
    assert [data["step"] for data in evaluations] == [4, 6]
    run = kept[0]
    batch = collate(list(run.data.evaluation))
    run.model.eval()
    with torch.no_grad():
        expected = float(compute_loss(run.recipe, run.model, batch, None))
    assert evaluations[-1]["eval_loss"] == pytest.approx(expected, rel=1e-5)
    rows = session.log.of("step")
    assert [row["step"] for row in rows if "eval_loss" in row] == [4, 6]
    assert rows[-1]["eval_loss"] == evaluations[-1]["eval_loss"]


def test_without_held_out_rows_nothing_is_evaluated(tiny):
    session = tiny(small_recipe(evaluation__split="none", evaluation__eval_steps=2)).start().wait(60)
    assert session.log.of("evaluation") == []


@pytest.mark.parametrize(
    ("samples", "epochs", "accumulation"), [(21, 1.0, 3), (22, 0.5, 1), (22, 2.3, 3), (1, 1.0, 3), (24, 1.01, 4)]
)
def test_steps_are_counted_as_the_trainer_counts_them(tiny, samples, epochs, accumulation):
    recipe = small_recipe(training__max_steps=-1, training__num_train_epochs=epochs, evaluation__split="none")
    recipe = recipe.with_changes({"training.gradient_accumulation_steps": accumulation})
    session = tiny(recipe, num_samples=samples).start().wait(60)
    assert session.step == session.num_steps == count_steps(recipe, samples)


class _Poison:
    """Makes the gradient of one weight NaN in one micro-step."""

    def __init__(self, micro_step, value=math.nan):
        self.micro_step, self.value, self.count = micro_step, value, 0
        self.before = None

    def install(self, run):
        self.run = run
        target = next(p for name, p in run.model.named_parameters() if "lora_B" in name and "layers.1" in name)
        target.register_hook(self._hook)

    def _hook(self, gradient):
        self.count += 1
        if self.count == self.micro_step:
            self.before = _trainable(self.run)
            return torch.full_like(gradient, self.value)
        return None


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_bad_gradient_stops_the_run_and_changes_no_weight(tiny, value, clip):
    poison = _Poison(micro_step=5, value=value)
    session = tiny(small_recipe(training__max_grad_norm=clip), prepare=poison.install).start()
    with pytest.raises(
        NonFiniteError,
        match=r"Step 3: .*gradient norm (nan|inf); no weight was updated.*layers\.1.*lora_B.* \(1 in all\)",
    ):
        session.wait(60)
    assert _same(poison.before, _trainable(poison.run))
    assert session.state == "failed"
    last = session.log.of("step")[-1]
    assert last["step"] == 3
    assert not math.isfinite(last["grad_norm"])
    assert math.isfinite(last["loss"])


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_bnb_8bit", "adafactor", "sgd"])
def test_a_bad_gradient_can_be_skipped(tiny, optim):
    poison, after = _Poison(micro_step=5), []

    def prepare(run):
        poison.install(run)
        run.optimizer.register_step_post_hook(lambda *args: after.append(_trainable(run)))

    recipe = small_recipe(policies__on_nonfinite="skip", training__optim=optim)
    session = tiny(recipe, prepare=prepare).start().wait(60)
    assert (session.state, session.step) == ("done", 6)
    assert _same(after[1], after[2])
    assert not _same(after[2], after[3])
    assert all(bool(torch.isfinite(value).all()) for value in after[-1].values())
    assert "Step 3" in session.log.of("log")[0]["message"]


def test_skipping_ends_when_nothing_recovers(tiny, monkeypatch):
    monkeypatch.setattr(engine_module, "MAX_SKIPPED_STEPS", 3)

    def prepare(run):
        run.model.get_base_model().lm_head.register_forward_hook(lambda module, args, out: out * math.nan)

    session = tiny(small_recipe(policies__on_nonfinite="skip"), prepare=prepare).start()
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        session.wait(60)
    assert [math.isnan(row["loss"]) for row in session.log.of("step")] == [True, True, True]


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_float16_overflow_lowers_the_scale_and_skips_the_step(tiny, optim):
    poison, after = _Poison(micro_step=3, value=math.inf), []

    class Watch:
        def on_event(self, event):
            if event.kind == "step":
                after.append(_trainable(poison.run))

    precision = Precision(uses_grad_scaler=True)
    recipe = small_recipe(training__optim=optim)
    session = tiny(recipe, prepare=poison.install, precision=precision, observers=[Watch()]).start().wait(60)
    rows = session.log.of("step")
    assert [row["loss_scale"] for row in rows] == [65536.0] * 2 + [32768.0] * 4
    assert rows[1]["grad_norm"] == math.inf
    assert [_same(*pair) for pair in pairwise(after)] == [True, False, False, False, False]
    assert "overflowed" in session.log.of("log")[0]["message"]
    assert session.state == "done"


def test_scaled_training_is_unscaled_training(tiny):
    plain = tiny(small_recipe(), run_dir="plain").start().wait(60)
    scaled = tiny(small_recipe(), run_dir="scaled", precision=Precision(uses_grad_scaler=True)).start().wait(60)
    for name in ("loss", "grad_norm"):
        first, second = ([row[name] for row in session.log.of("step")] for session in (plain, scaled))
        assert first == pytest.approx(second, rel=1e-4)


def test_a_step_without_supervised_tokens_changes_nothing(tiny):
    after = []

    def prepare(run):
        run.data.train = run.data.train.map(lambda row: {"labels": [-100] * len(row["labels"])})
        after.append(_trainable(run))
        run.optimizer.register_step_post_hook(lambda *args: after.append(_trainable(run)))

    session = tiny(small_recipe(training__max_steps=1), prepare=prepare).start().wait(60)
    row = session.log.of("step")[0]
    assert "loss" not in row
    assert row["num_supervised_tokens"] == 0
    assert row["grad_norm"] == 0.0
    assert _same(after[0], after[1])


def test_early_stopping_keeps_the_best_checkpoint_and_its_weights(tiny):
    recipe = small_recipe(
        training__max_steps=30,
        training__learning_rate=0.3,
        training__optim="sgd",
        training__max_grad_norm=0.0,
        training__save_total_limit=1,
        evaluation__eval_steps=1,
        evaluation__early_stopping_patience=3,
        evaluation__load_best_model_at_end=True,
    )
    kept = []

    def prepare(run):
        kept.append(run)
        # From step 4 on the updates point the wrong way: the held-out loss must rise.
        scales = iter([1.0] * 3 + [-20.0] * 100)

        def turn(*args):
            scale = next(scales)
            for parameter in run.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)

        run.optimizer.register_step_pre_hook(turn)

    session = tiny(recipe, prepare=prepare).start().wait(60)
    losses = [data["eval_loss"] for data in session.log.of("evaluation")]
    best = losses.index(min(losses)) + 1
    assert session.step == len(losses) == best + 3
    names = [path.name for path in list_checkpoints(session.run_dir)]
    assert names == [f"step-{best:06d}", f"step-{session.step:06d}"]
    run = kept[0]
    run.model.eval()
    with torch.no_grad():
        reached = float(compute_loss(run.recipe, run.model, collate(list(run.data.evaluation)), None))
    assert reached == pytest.approx(min(losses), rel=1e-5)
    assert "Stopped early" in session.log.of("log")[-1]["message"]


def test_old_checkpoints_are_removed(tiny):
    session = (
        tiny(small_recipe(training__save_steps=1, training__save_total_limit=2, evaluation__split="none"))
        .start()
        .wait(60)
    )
    assert [path.name for path in list_checkpoints(session.run_dir)] == ["step-000005", "step-000006"]
    everything = (
        tiny(small_recipe(training__save_steps=1, training__save_total_limit=None), run_dir="all").start().wait(60)
    )
    assert len(list_checkpoints(everything.run_dir)) == 6


def test_a_full_disk_fails_in_one_sentence_and_keeps_what_was_saved(tiny, monkeypatch):
    original, calls = torch.save, []

    def fills_up(value, path, *args, **kwargs):
        calls.append(path)
        if "step-000004" in str(path):
            raise RuntimeError("[enforce fail at inline_container.cc:664] . PytorchStreamWriter failed writing file")
        return original(value, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", fills_up)
    session = tiny(small_recipe(training__save_steps=2)).start()
    with pytest.raises(RunFolderError, match=r"cannot be written .*What was saved before is unharmed"):
        session.wait(60)
    names = sorted(path.name for path in (session.run_dir / "checkpoints").iterdir())
    assert names == ["step-000002"]
    assert calls


def test_checkpoints_hold_no_pickles_that_run_code(tiny):
    session = tiny(small_recipe(training__max_steps=2)).start().wait(60)
    checkpoint = list_checkpoints(session.run_dir)[-1]
    from transformers.trainer_pt_utils import safe_globals

    for path in [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")]:
        with safe_globals():
            torch.load(path, weights_only=True)
    assert not list(checkpoint.glob("*.bin"))
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 2


def test_the_trainers_history_does_not_grow_with_steps(tiny, tmp_path):
    pytest.importorskip("tensorboard")
    recipe = small_recipe(training__report_to=("tensorboard",), evaluation__eval_steps=3)
    session = tiny(recipe).start().wait(60)
    state = json.loads((list_checkpoints(session.run_dir)[-1] / "trainer_state.json").read_text())
    assert [set(entry) >= {"eval_loss"} for entry in state["log_history"]] == [True, True]
    assert list(session.run_dir.rglob("events.out.tfevents*"))
