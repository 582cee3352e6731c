"""Images of a trace: one a sample, of the config's size, as the model's own processor would hand it over."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from .optimizers import without_modes

# Where a config says no size: what most vision towers were trained on (CLIP, SigLIP, ViT).
DEFAULT_IMAGE_SIZE = 224
DEFAULT_PATCH_SIZE = 14


def image_inputs(model: Any, size: tuple[int, int]) -> dict[str, Tensor]:
    """Return what a model takes beside its tokens for one image in each sample.

    Models of the Qwen-VL kind take patches in a row and the grid they stand in; the grid is read by Python, so it
    holds real numbers. Models of the Idefics kind take several images a sample, all others one row of images.

    Args:
        model: The model on the meta device, with or without an adapter.
        size: Samples, and tokens of each.
    """
    inner = getattr(model, "get_base_model", None)
    base = inner() if inner is not None else model
    taken = _parameters(base)
    vision = _vision_config(base.config)
    height, width = _image_size(base.config, vision)
    patch = _number(vision, ("patch_size", "spatial_patch_size"), DEFAULT_PATCH_SIZE)
    channels = _number(vision, ("num_channels", "in_channels", "in_chans"), 3)
    batch: dict[str, Tensor] = {}
    if "image_grid_thw" in taken:
        merge = _number(vision, ("spatial_merge_size", "merge_size"), 2)
        rows, columns = (max(1, side // (patch * merge)) * merge for side in (height, width))
        depth = _number(vision, ("temporal_patch_size",), 1)
        patches = (size[0] * rows * columns, channels * depth * patch * patch)
        batch["pixel_values"] = _floats(patches)
        batch["image_grid_thw"] = _numbers([[1, rows, columns]] * size[0])
        if any(hasattr(module, "get_rope_index") for module in base.modules()):
            # Height, width and time of each token: the model reads them off the token ids, which a trace does not have.
            batch["position_ids"] = torch.empty((3, *size), dtype=torch.int64, device="meta")
    elif "pixel_attention_mask" in taken:
        batch["pixel_values"] = _floats((size[0], 1, channels, height, width))
    else:
        tiles = _num_tiles(base.config, height, width)
        batch["pixel_values"] = _floats((size[0], *tiles, channels, height, width))
        # Where image sizes are optional they mean a tower that takes images of any size (Pixtral), or tiles.
        if "image_sizes" in taken and (tiles or getattr(vision, "model_type", "") == "pixtral"):
            batch["image_sizes"] = _numbers([[height, width]] * size[0])
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in taken:
            batch[name] = torch.empty(size, dtype=torch.int64, device="meta")
    return {name: value for name, value in batch.items() if name in taken}


def _num_tiles(config: Any, height: int, width: int) -> tuple[int, ...]:
    """Return ``(tiles,)`` of an image where the model cuts it into tiles of its tower's size, else nothing."""
    pinpoints = getattr(config, "image_grid_pinpoints", None)
    if not pinpoints:
        return ()
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    return (int(image_size_to_num_patches([height, width], pinpoints, height)),)


def _parameters(model: Any) -> frozenset[str]:
    return frozenset(inspect.signature(type(model).forward).parameters)


def _vision_config(config: Any) -> Any:
    for name in ("vision_config", "vision_tower_config", "vq_config", "image_config", "encoder"):
        found = getattr(config, name, None)
        if found is not None and not isinstance(found, str):
            return found
    return config


def _image_size(config: Any, vision: Any) -> tuple[int, int]:
    for part in (vision, config):
        found = getattr(part, "image_size", None)
        if isinstance(found, (list, tuple)) and len(found) == 2:
            return int(found[0]), int(found[1])
        if isinstance(found, int):
            return found, found
    return DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE


def _number(config: Any, names: tuple[str, ...], default: int) -> int:
    for name in names:
        found = getattr(config, name, None)
        if isinstance(found, (list, tuple)) and found:
            found = found[-1]
        if isinstance(found, int) and found > 0:
            return found
    return default


def _numbers(rows: list[list[int]]) -> Tensor:
    """Return real numbers on the CPU: the model's Python reads them."""
    with without_modes():
        return torch.tensor(rows)


def _floats(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")
