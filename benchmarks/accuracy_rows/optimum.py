"""optimum-benchmark's training of Llama-2: HF's Trainer on dummy tokens, fp16 weights without autocast. Speed only."""

from __future__ import annotations

from typing import Any

from workbench.recipe import Recipe

from . import scripts
from .row import MappedRow, Row, UnmappedRow, full_batch


def map_row(row: Row) -> MappedRow | UnmappedRow:
    """Return the row as a Recipe, or why not."""
    quantization = str(row["quantization"] or "")
    if quantization.startswith("GPTQ"):
        return UnmappedRow(row, "a base in GPTQ int4 is not in the Recipe")
    method = row["method"]
    adapter: dict[str, Any] = {"method": "none"}
    if method != "full":
        lora = row["lora"]
        adapter = {
            "r": lora["r"],
            "lora_alpha": lora["alpha"],
            "lora_dropout": lora["dropout"],
            "target_modules": lora["target_modules"],
        }
    recipe = Recipe.from_dict(
        {
            "model": {"name_or_path": row["model_id"], "dtype": "float16", "attn_implementation": "eager"},
            "data": {"max_length": row["seq_len"]},
            "adapter": adapter,
            "quantization": {"load_in_4bit": method == "qlora", "bnb_4bit_quant_type": "fp4"},
            "training": {
                "per_device_train_batch_size": row["micro_batch_size"],
                "gradient_accumulation_steps": row["grad_accum"],
                "optim": "adamw_torch",
                "mixed_precision": "no",
            },
            "evaluation": {"split": "none"},
            "hardware": {"torch_version": "2.1.1"},
        }
    )
    rate = row["speed"].get("samples_per_s")
    return MappedRow(
        row=row,
        recipe=recipe,
        shape=full_batch(row),
        device="NVIDIA A100-SXM4-80GB",
        script=scripts.OLD_TRAINER,
        step_s=row["micro_batch_size"] * row["grad_accum"] / rate if rate else None,
    )
