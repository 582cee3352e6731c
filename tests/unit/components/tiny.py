"""A two-layer Llama of a few thousand weights, and devices, for the tests of this folder and of train/."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from workbench.hardware import Device
from workbench.recipe import Recipe

GIB = 2**30
CPU = Device(
    name="CPU", kind="cpu", capacity_bytes=8 * GIB, bf16_native=False, source="this machine", is_emulated=False
)
GPU = Device(name="New GPU", kind="cuda", capacity_bytes=24 * GIB, compute_capability=(8, 6))
OLD_GPU = Device(name="Old GPU", kind="cuda", capacity_bytes=15 * GIB, compute_capability=(7, 5), bf16_native=False)
VOCABULARY = 128


def recipe_with(changes) -> Recipe:
    return Recipe().with_changes({"model.dtype": "auto", **changes})


def tiny_config(layers: int = 2, **changes):
    from transformers import LlamaConfig

    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return LlamaConfig(**{**values, **changes})


def tiny_source(folder: Path, *, has_weights: bool = True, layers: int = 2, dtype=torch.float32, **changes):
    """A stand-in for ModelSource with the same attributes; weights are drawn from seed 0."""
    config = tiny_config(layers, **changes)
    config.dtype = dtype
    if has_weights and not (folder / "config.json").exists():
        from transformers import LlamaForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return SimpleNamespace(
        name="tiny",
        kind="folder",
        config=config,
        path=str(folder) if has_weights else None,
        revision=None,
        has_weights=has_weights,
        has_tokenizer=False,
        note="",
    )


def batch_of(rows: int = 2, length: int = 12, seed: int = 0, prompt: int = 4):
    """Random tokens whose first ``prompt`` are not learned."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels = tokens.clone()
    labels[:, :prompt] = -100
    return {"input_ids": tokens, "labels": labels}
