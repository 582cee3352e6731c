"""Pruned weights are exact zeros in what is saved, whatever trained after; the run says what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from workbench.components.pruning import apply_masks, choose_masks, prunable, read_masks, save_masks, sparsity_by_layer
from workbench.estimate import estimate_run
from workbench.hardware import find_device

from ..components.tiny import tiny_config
from .parts import build_tiny_run, small_recipe

FULL = {"adapter__method": "none", "pruning__method": "l1_global", "pruning__amount": 0.4}


def result_of(session: Any) -> dict[str, torch.Tensor]:
    return load_file(session.result_dir / "model.safetensors")


def matrices(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in tensors.items() if "layers." in name and one.ndim == 2}


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "lion_8bit", "adafactor"])
def test_the_smallest_weights_of_all_layers_stay_zero_while_the_others_train(tiny, optim: str) -> None:
    changes = {**FULL, "pruning__step": 2, "training__optim": optim, "training__weight_decay": 0.1}
    session = tiny(small_recipe(**changes)).start().wait()
    found = matrices(result_of(session))
    zeros = sum(int((one == 0).sum()) for one in found.values()) / sum(one.numel() for one in found.values())
    assert zeros == pytest.approx(0.4, abs=2e-3)
    shares = {round(float((one == 0).float().mean()), 2) for one in found.values()}
    assert len(shares) > 1  # Global: not the same share of every matrix.
    told = session.summary()["pruning"]
    assert told["step"] == 2 and told["sparsity"]["all"] == pytest.approx(zeros)
    assert set(told["sparsity"]) == {"0", "1", "all"}
    assert told["loss_before"] > 0 and told["loss_after"] != told["loss_before"]
    assert session.log.of("step")[-1]["loss"] > 0


def test_whole_rows_go_and_at_the_end_nothing_trains_on(tiny) -> None:
    plain = tiny(small_recipe(adapter__method="none"), run_dir="plain").start().wait()
    changes = {**FULL, "pruning__method": "structured", "pruning__amount": 0.25, "pruning__step": None}
    session = tiny(small_recipe(**changes), run_dir="pruned").start().wait()
    before, after = matrices(result_of(plain)), matrices(result_of(session))
    for name, one in after.items():
        gone = (one == 0).all(dim=1)
        assert int(gone.sum()) == round(0.25 * len(one)), name
        assert torch.equal(one[~gone], before[name][~gone])
        assert before[name][gone].norm(dim=1).max() <= before[name][~gone].norm(dim=1).min()
    assert session.summary()["pruning"]["step"] == 6


def test_masked_gradients_are_zero_before_the_norm_is_taken(tmp_path: Path) -> None:
    recipe = small_recipe(**FULL)
    run = build_tiny_run(recipe, tmp_path / "model")
    apply_masks(run.model, choose_masks(recipe, run.model))
    batch = run.collator([run.data.train[0], run.data.train[1]])
    run.model(**batch).loss.backward()
    for module in prunable(run.model).values():
        assert float(module.weight.grad[module.weight == 0].abs().sum()) == 0
        assert float(module.weight.grad.abs().sum()) > 0
    assert all(one.requires_grad for one in run.model.parameters())


def test_a_pruned_base_under_an_adapter_stays_frozen_and_its_masks_lie_beside_the_adapter(tiny, tmp_path) -> None:
    session = tiny(small_recipe(pruning__method="l1_global")).start().wait()
    run = build_tiny_run(small_recipe(), tmp_path / "model")
    masks = read_masks(session.result_dir)
    assert masks is not None and set(masks) == set(prunable(run.model))
    apply_masks(run.model, masks)
    assert sparsity_by_layer(run.model)["all"] == pytest.approx(0.3, abs=2e-3)
    trains = [name for name, one in run.model.named_parameters() if one.requires_grad]
    assert trains and all("lora_" in name for name in trains)


def test_masks_of_odd_sizes_come_back(tmp_path: Path) -> None:
    run = build_tiny_run(small_recipe(adapter__method="none"), tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    masks = {
        name: torch.rand(module.weight.shape, generator=generator) < 0.5 for name, module in prunable(run.model).items()
    }
    apply_masks(run.model, masks)
    save_masks(run.model, tmp_path)
    back = read_masks(tmp_path)
    assert back is not None and all(torch.equal(back[name], mask) for name, mask in masks.items())


def test_the_estimate_holds_the_masks() -> None:
    config = {**tiny_config().to_dict(), "dtype": "float32"}
    recipe = small_recipe(adapter__method="none").with_changes(
        {"model.config": config, "training.mixed_precision": "no"}
    )
    device = find_device("Tesla T4")
    plain = estimate_run(recipe, device).memory.breakdown
    pruned = estimate_run(recipe.with_changes({"pruning.method": "l1_global"}), device).memory.breakdown
    num_weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)  # A byte each.
    assert pruned["parameter"] - plain["parameter"] == pytest.approx(num_weights, rel=0.05)
