"""One micro-step is what transformers' Trainer does."""

from __future__ import annotations

import copy

import torch

from workbench.components.model import build_model
from workbench.components.precision import Precision
from workbench.components.step import micro_step

from .tiny import CPU, batch_of, recipe_with, tiny_source


def _gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_equal_those_of_the_trainer_under_bf16(tmp_path):
    from transformers import Trainer, TrainingArguments

    recipe = recipe_with({"adapter.method": "none"})
    ours = build_model(recipe, tiny_source(tmp_path), CPU, place="cpu")
    theirs = copy.deepcopy(ours)
    arguments = TrainingArguments(str(tmp_path / "out"), bf16=True, use_cpu=True, report_to=[])
    trainer = Trainer(theirs, arguments)
    prepared = trainer.accelerator.prepare_model(theirs)
    batch = batch_of()
    expected = trainer.training_step(prepared, dict(batch), torch.tensor(18))
    actual = micro_step(recipe, ours, batch, 18, Precision(autocast_dtype=torch.bfloat16))
    assert torch.equal(expected, actual)
    reference = _gradients(theirs)
    assert reference
    for name, gradient in _gradients(ours).items():
        assert torch.equal(gradient, reference[name]), name


def test_micro_steps_add_up_to_the_large_batch(tmp_path):
    recipe = recipe_with({"adapter.method": "none"})
    model = build_model(recipe, tiny_source(tmp_path), CPU, place="cpu")
    batch = batch_of(rows=4)
    batch["labels"][0, :9] = -100  # Unequal numbers of supervised tokens: a mean of means would differ.
    items = int(batch["labels"][:, 1:].ne(-100).sum())
    whole = micro_step(recipe, model, batch, items, Precision())
    reference = _gradients(model)
    model.zero_grad()
    parts = [
        micro_step(recipe, model, {name: value[row : row + 1] for name, value in batch.items()}, items, Precision())
        for row in range(4)
    ]
    torch.testing.assert_close(sum(parts), whole)
    for name, gradient in _gradients(model).items():
        torch.testing.assert_close(gradient, reference[name], msg=name)


def test_scaled_gradients_are_unscaled_losses_are_not(tmp_path):
    recipe = recipe_with({"adapter.method": "none"})
    model = build_model(recipe, tiny_source(tmp_path), CPU, place="cpu")
    plain = micro_step(recipe, model, batch_of(), 18, Precision())
    reference = _gradients(model)
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = micro_step(recipe, model, batch_of(), 18, Precision(uses_grad_scaler=True), scaler)
    assert torch.equal(plain, scaled)
    for name, gradient in _gradients(model).items():
        torch.testing.assert_close(gradient, 1024 * reference[name], msg=name)
