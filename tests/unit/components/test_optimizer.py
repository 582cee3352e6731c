"""Every optimizer of the Recipe updates real weights and traces on fake ones."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from workbench.components.model import build_model, resolve_precision
from workbench.components.optimizer import build_optimizer, build_schedule, parameter_groups
from workbench.components.step import micro_step
from workbench.errors import ModelError
from workbench.recipe.parts import OPTIMIZERS

from .tiny import CPU, batch_of, recipe_with, tiny_source


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_lowers_the_loss(tmp_path, name):
    rate = {"sgd": 1.0, "lion_8bit": 3e-3}.get(name, 1e-2)
    method = "none" if name == "galore_adamw" else "lora"
    recipe = recipe_with({"training.optim": name, "training.learning_rate": rate, "adapter.method": method})
    torch.manual_seed(0)
    model = build_model(recipe, tiny_source(tmp_path), CPU, place="cpu")
    optimizer = build_optimizer(recipe, model)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    losses = []
    for _ in range(12):
        losses.append(float(micro_step(recipe, model, batch_of(), 18, resolve_precision(recipe, CPU))))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.97 * losses[0]
    assert all(torch.equal(value, dict(model.named_parameters())[n]) for n, value in frozen.items())


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch", "adafactor", "sgd"])
@pytest.mark.parametrize("for_cuda", [True, False])
def test_optimizers_step_on_fake_parameters(tmp_path, name, for_cuda):
    recipe = recipe_with({"training.optim": name})
    model = build_model(recipe, tiny_source(tmp_path, has_weights=False), CPU, place="meta")
    with FakeTensorMode() as mode:
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    module._parameters[key] = torch.nn.Parameter(fake, requires_grad=parameter.requires_grad)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        batch = {key: mode.from_tensor(value) for key, value in batch_of().items()}
        optimizer = build_optimizer(recipe, model, for_cuda=for_cuda)
        for _ in range(2):
            loss = micro_step(recipe, model, batch, 10, resolve_precision(recipe, CPU))
            optimizer.step()
            optimizer.zero_grad()
    assert loss.shape == ()
    assert bool(optimizer.state) is (name != "sgd")


def test_only_matrices_decay():
    layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3), torch.nn.Embedding(4, 3))
    layer[2].weight.requires_grad_(False)
    decayed, plain = parameter_groups(layer, 0.1)
    assert [tuple(p.shape) for p in decayed["params"]] == [(3, 3)]
    assert [tuple(p.shape) for p in plain["params"]] == [(3,), (3,), (3,)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_settings_reach_the_optimizer():
    recipe = recipe_with(
        {
            "training.adam_beta1": 0.5,
            "training.adam_beta2": 0.7,
            "training.adam_epsilon": 1e-3,
            "training.weight_decay": 0.3,
        }
    )
    for name in ("adamw_torch", "adamw_bnb_8bit"):
        optimizer = build_optimizer(recipe.with_changes({"training.optim": name}), torch.nn.Linear(3, 3))
        group = optimizer.param_groups[0]
        assert (tuple(group["betas"]), group["eps"], group["weight_decay"]) == ((0.5, 0.7), 1e-3, 0.3)
    assert build_optimizer(recipe, torch.nn.Linear(2, 2)).param_groups[0]["fused"] is True


def test_nothing_trainable_is_an_error():
    with pytest.raises(ModelError, match="No parameter"):
        build_optimizer(recipe_with({}), torch.nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize(
    ("name", "warmup", "expected"),
    [
        ("linear", 0, [1.0, 0.75, 0.5, 0.25]),
        ("linear", 2, [0.0, 0.5, 1.0, 0.5]),
        ("constant", 2, [0.0, 0.5, 1.0, 1.0]),
        ("constant", 0, [1.0, 1.0, 1.0, 1.0]),
        ("constant_with_warmup", 2, [0.0, 0.5, 1.0, 1.0]),
    ],
)
def test_schedules(name, warmup, expected):
    changes = {"training.lr_scheduler_type": name, "training.warmup_steps": warmup, "training.learning_rate": 1.0}
    recipe = recipe_with({**changes, "training.optim": "sgd"})
    optimizer = build_optimizer(recipe, torch.nn.Linear(2, 2))
    schedule = build_schedule(recipe, optimizer, 4)
    rates = []
    for _ in range(4):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(expected)
