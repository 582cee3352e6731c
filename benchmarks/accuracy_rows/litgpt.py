"""LitGPT's table of config_hub: its own model code, bf16 throughout, no checkpointing, the head in chunks."""

from __future__ import annotations

from typing import Any

from workbench.recipe import Recipe

from . import scripts
from .row import MappedRow, Row, UnmappedRow, full_batch, readings_of

_TARGETS = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "projection": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "head": ("lm_head",),
}
# Falcon keeps query, key and value in one matrix; LitGPT puts an adapter on parts of it.
_FALCON = {"query": ("query_key_value",), "value": ("query_key_value",)}


def map_row(row: Row) -> MappedRow | UnmappedRow:
    """Return the row as a Recipe over transformers' code of the same architecture."""
    quantized = row["quantization"] is not None
    if quantized and "falcon" in row["model_id"]:
        return UnmappedRow(
            row, "transformers 5 leaves Falcon's own Linear class unquantised, where LitGPT quantises it"
        )
    recipe = Recipe.from_dict(
        {
            "model": {"name_or_path": row["model_id"], "dtype": "bfloat16"},
            "data": {"max_length": row["seq_len"]},
            "adapter": _adapter(row),
            "quantization": {"load_in_4bit": quantized, "prepare_model_for_kbit_training": False},
            "training": {
                "per_device_train_batch_size": row["micro_batch_size"],
                "gradient_accumulation_steps": max(1, int(row["grad_accum"] or 1)),
                # LitGPT swaps in a paged AdamW for a quantised base; its states live in managed memory.
                "optim": "paged_adamw_8bit" if quantized else "adamw_torch",
                "learning_rate": 2e-4,
                "max_grad_norm": 0.0,
                "mixed_precision": "no",
            },
            "evaluation": {"split": "none"},
            "hardware": {"torch_version": "2.3.0"},
        }
    )
    differences = [
        "LitGPT's own model code (fused qkv, adapters on parts of it, float32 norms) against transformers'",
        "the longest sample is assumed to reach the limit of 512 tokens",
    ]
    return MappedRow(
        row=row,
        recipe=recipe,
        shape=full_batch(row),
        device="NVIDIA A10G",
        script=scripts.litgpt(row),
        readings=readings_of(row),
        step_s=None,
        differences=tuple(differences),
    )


def _adapter(row: Row) -> dict[str, Any]:
    if row["method"] == "full":
        return {"method": "none"}
    lora = row["lora"]
    table = _TARGETS | (_FALCON if "falcon" in row["model_id"] else {})
    targets = [module for name in lora["target_modules"] for module in table[name]]
    return {
        "r": lora["r"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": list(dict.fromkeys(targets)),
        "autocast_adapter_dtype": False,
    }
