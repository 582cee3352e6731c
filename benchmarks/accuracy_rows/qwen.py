"""Qwen's README: its finetune.py (HF's Trainer with PEFT) on inputs of one length.

Graded for speed only: the README says neither which counter its memory is nor whether its G is 10**9.
"""

from __future__ import annotations

from typing import Any

from workbench.recipe import Recipe

from . import scripts
from .row import MappedRow, Row, UnmappedRow, full_batch

# finetune.py names the modules of Qwen's own code; Qwen2's code splits the fused ones.
_TARGETS = {
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "c_proj": ("o_proj", "down_proj"),
    "w1": ("up_proj",),
    "w2": ("gate_proj",),
}


def map_row(row: Row) -> MappedRow | UnmappedRow:
    """Return the row as a Recipe, or why not."""
    if row["quantization"]:
        return UnmappedRow(row, f"a base in {row['quantization']} is not in the Recipe")
    if row["seq_len"] is None:
        return UnmappedRow(row, "no length is given")
    recipe = Recipe.from_dict(
        {
            "model": {"name_or_path": row["model_id"], "dtype": "bfloat16", "attn_implementation": "flash_attention_2"},
            "data": {"max_length": row["seq_len"]},
            "adapter": _adapter(row),
            "training": {
                "per_device_train_batch_size": row["micro_batch_size"],
                "gradient_accumulation_steps": row["grad_accum"],
                "optim": "adamw_torch",
                "mixed_precision": "bf16",
                "gradient_checkpointing": True,
            },
            "evaluation": {"split": "none"},
            "hardware": {"torch_version": "2.0.1"},
        }
    )
    return MappedRow(
        row=row,
        recipe=recipe,
        shape=full_batch(row),
        device="NVIDIA A100-SXM4-80GB",
        script=scripts.OLD_TRAINER,
        step_s=float(row["speed"]["s_per_it"]) if row["speed"] else None,
        differences=("the model's own code of 2023 against transformers' Qwen2",),
    )


def _adapter(row: Row) -> dict[str, Any]:
    if row["method"] == "full":
        return {"method": "none"}
    lora = row["lora"]
    targets = [module for name in lora["target_modules"] for module in _TARGETS[name]]
    whole = {"wte": "embed_tokens", "lm_head": "lm_head"}
    return {
        "r": lora["r"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": targets,
        "modules_to_save": [whole[name] for name in lora.get("modules_to_save") or ()],
    }
