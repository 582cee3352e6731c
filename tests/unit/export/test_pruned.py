"""A pruned base stays pruned through its adapter's folder and through merging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from workbench.components.model import build_model
from workbench.components.pruning import apply_masks, choose_masks, prunable, save_masks
from workbench.components.source import find_source
from workbench.export.loading import load_result
from workbench.export.merged import write_merged
from workbench.hardware import Device
from workbench.recipe import Recipe
from workbench.train.checkpoint import save_weights

CPU = Device(name="CPU", kind="cpu", capacity_bytes=2**33, bf16_native=False)


def test_the_merged_model_holds_exact_zeros_and_says_what_the_mask_took(tmp_path: Path) -> None:
    recipe = Recipe().with_changes({"model.name_or_path": "tiny-llama", "pruning.method": "l1_global"})
    source = find_source(recipe, for_training=True)
    model: Any = build_model(recipe, source, CPU, place="cpu")
    masks = choose_masks(recipe, model)
    apply_masks(model, masks)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    result = tmp_path / "adapter"
    result.mkdir()
    save_weights(model, result)
    save_masks(model, result)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(load_result(recipe, source, result)(input_ids=tokens).logits, model.eval()(tokens).logits)
    (tmp_path / "merged").mkdir()
    checks = write_merged(recipe, result, tmp_path / "merged")
    assert checks["mean_logit_difference_by_mask"] > 0 and checks["mean_logit_difference"] < 1e-5
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert set(masks) == set(prunable(model))
    for name, mask in masks.items():
        weight = tensors[f"{name}.weight"]
        assert torch.equal(weight == 0, mask), name
