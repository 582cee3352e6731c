"""GaLore: moments of low rank, exact where the rank is full, saved and loaded as tensors alone."""

from __future__ import annotations

import pytest
import torch

from workbench.components.galore import GaLoreAdamW, find_projection, galore_groups, project, project_back
from workbench.components.model import build_model, resolve_precision
from workbench.components.optimizer import build_optimizer
from workbench.components.step import micro_step
from workbench.recipe import find_problems

from .tiny import CPU, batch_of, recipe_with, tiny_source

WHOLE = {"adapter.method": "none", "training.optim": "galore_adamw", "training.galore_rank": 4}


@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (8, 8)])
def test_a_gradient_of_low_rank_survives_its_projection(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    grad = torch.randn(shape[0], 3) @ torch.randn(3, shape[1])
    projection = find_projection(grad, 3)
    low = project(grad, projection)
    assert low.numel() == 3 * max(shape)
    assert torch.allclose(project_back(low, projection), grad, atol=1e-5)


def test_the_update_is_adams_in_the_space_of_the_directions() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(10, 6))
    groups = [{"params": [weight], "rank": 2, "update_proj_gap": 2, "scale": 0.5}]
    optimizer = GaLoreAdamW(groups, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    expected, mean, square, directions = weight.detach().clone(), 0.0, 0.0, None
    for count in range(1, 5):
        grad = torch.randn(10, 6)
        weight.grad = grad.clone()
        optimizer.step()
        if count in (1, 3):  # Taken anew every second step.
            directions = torch.linalg.svd(grad, full_matrices=False)[2][:2]
        low = grad @ directions.T
        mean, square = 0.9 * mean + 0.1 * low, 0.99 * square + 0.01 * low**2
        update = mean / (square.sqrt() + 1e-8) @ directions * 0.5
        expected -= 0.1 * (1 - 0.99**count) ** 0.5 / (1 - 0.9**count) * update
        expected *= 1 - 0.1 * 0.1
        assert torch.allclose(weight, expected, atol=1e-6), count


def test_only_linear_layers_are_projected(tmp_path) -> None:
    recipe = recipe_with(WHOLE)
    model = build_model(recipe, tiny_source(tmp_path, has_weights=False), CPU, place="meta")
    low, whole, vectors = galore_groups(recipe, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(names[id(one)].endswith("proj.weight") for one in low["params"]) and len(low["params"]) == 14
    assert {names[id(one)].rpartition(".weight")[0] for one in whole["params"]} == {"model.embed_tokens", "lm_head"}
    assert all(one.ndim == 1 for one in vectors["params"]) and vectors["weight_decay"] == 0
    assert low["rank"] == 4 and "rank" not in whole


def test_its_state_is_saved_without_code_and_goes_on_exactly(tmp_path) -> None:
    recipe = recipe_with(WHOLE)

    def steps(count: int, state=None):
        torch.manual_seed(0)
        model = build_model(recipe, tiny_source(tmp_path / "model"), CPU, place="cpu")
        optimizer = build_optimizer(recipe, model)
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
        for _ in range(count):
            micro_step(recipe, model, batch_of(), 18, resolve_precision(recipe, CPU))
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    whole, _ = steps(4)
    half, optimizer = steps(2)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed, _ = steps(2, {"model": half.state_dict()})
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_an_adapter_and_stray_settings_are_refused() -> None:
    fields = {problem.field for problem in find_problems(recipe_with({"training.optim": "galore_adamw"}))}
    assert "training.optim" in fields
    stray = find_problems(recipe_with({"training.galore_rank": 8}))
    assert [problem.field for problem in stray] == ["training.galore_rank"]
    assert not find_problems(recipe_with(WHOLE))
