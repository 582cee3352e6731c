"""ms-swift's benchmark tables of early 2024: HF's Trainer with PEFT on Qwen-7B and others, unpacked samples."""

from __future__ import annotations

import re
from typing import Any

from workbench.recipe import Recipe

from . import scripts
from .row import MappedRow, Row, UnmappedRow, full_batch, readings_of

# What ms-swift's defaults and "ALL" mean in transformers' code of the same architecture.
_ALL = "all-linear"
_DEFAULT = {
    "qwen": ("q_proj", "k_proj", "v_proj"),
    "chatglm": ("q_proj", "k_proj", "v_proj"),
    "yi": ("q_proj", "k_proj", "v_proj"),
}


def map_row(row: Row) -> MappedRow | UnmappedRow:
    """Return the row as a Recipe, or why not."""
    quantization = str(row["quantization"] or "")
    if quantization.startswith(("GPTQ", "AWQ")):
        return UnmappedRow(row, f"a base in {quantization} is not in the Recipe")
    if row["method"] not in ("full", "lora", "qlora"):
        return UnmappedRow(row, f"the Recipe has LoRA and full fine-tuning, not {row['method']}")
    if "neftune" in str(row["lora"]):
        return UnmappedRow(row, "noise on the embeddings (NEFTune) is not in the Recipe")
    adapter = _adapter(row)
    length = row["seq_len"]
    values: dict[str, Any] = {
        "model": {"name_or_path": row["model_id"], "dtype": "bfloat16", "attn_implementation": "flash_attention_2"},
        "data": {"max_length": length},
        "adapter": adapter,
        "quantization": {"load_in_4bit": row["method"] == "qlora"},
        "training": {
            "per_device_train_batch_size": row["micro_batch_size"],
            "gradient_accumulation_steps": row["grad_accum"],
            "optim": "adamw_torch",
            "max_grad_norm": 0.5,
            "mixed_precision": "bf16",
            "gradient_checkpointing": row["gradient_checkpointing"].startswith("full"),
        },
        "evaluation": {"split": "none"},
        "hardware": {"torch_version": "2.1.1"},
    }
    return MappedRow(
        row=row,
        recipe=Recipe.from_dict(values),
        shape=full_batch(row),
        device="NVIDIA A100-SXM4-80GB",
        script=scripts.OLD_TRAINER,
        readings=readings_of(row),
        step_s=None,  # Mean lengths of its samples are not published: whole-run speeds say nothing of one step.
        differences=(
            "samples of varying length: reserved memory grows with fragmentation over the run",
            "the model's own code of the time (Qwen casts and fuses by itself)",
        ),
    )


def _adapter(row: Row) -> dict[str, Any]:
    if row["method"] == "full":
        return {"method": "none"}
    spec = str((row["lora"] or {}).get("spec", ""))
    if spec:
        rank = re.search(r"rank=(\d+)", spec)
        return {
            "r": int(rank.group(1)) if rank else 8,
            "lora_alpha": 32,
            "lora_dropout": 0.05,
            "target_modules": _ALL,
            "use_dora": "use_dora=True" in spec,
        }
    lora = row["lora"]
    family = next(
        (names for key, names in _DEFAULT.items() if key in row["model_id"].lower()), ("q_proj", "k_proj", "v_proj")
    )
    return {"r": lora["r"], "lora_alpha": lora["alpha"], "lora_dropout": lora["dropout"], "target_modules": family}
