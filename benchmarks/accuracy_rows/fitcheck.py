"""fitcheck-llm's T4 rows: a plain loop of two steps on random tokens, fp16 without autocast, no clipping.

Source: ``scripts/measure.py`` in the source distribution of fitcheck-llm 0.3.1 (MIT).
"""

from __future__ import annotations

from workbench.recipe import Recipe

from . import scripts
from .row import MappedRow, Row, full_batch, readings_of


def map_row(row: Row) -> MappedRow:
    """Return the row as a Recipe; every setting of these rows can be expressed."""
    attention = "eager" if row["attn_impl"] == "eager" else "sdpa"
    quantized = row["quantization"] is not None
    recipe = Recipe.from_dict(
        {
            "model": {"name_or_path": row["model_id"], "dtype": "float16", "attn_implementation": attention},
            "data": {"max_length": row["seq_len"]},
            "adapter": {
                "r": row["lora"]["r"],
                "lora_alpha": row["lora"]["alpha"],
                "lora_dropout": row["lora"]["dropout"],
                "target_modules": row["lora"]["target_modules"],
            },
            "quantization": {"load_in_4bit": quantized},
            "training": {
                "per_device_train_batch_size": row["micro_batch_size"],
                "gradient_accumulation_steps": 1,
                "optim": "adamw_torch",
                "learning_rate": 1e-4,
                "weight_decay": 0.01,
                "max_grad_norm": 0.0,
                "mixed_precision": "no",
                "gradient_checkpointing": True,
            },
            "evaluation": {"split": "none"},
            "hardware": {"torch_version": row["versions"].split()[1].rstrip(",")},
        }
    )
    return MappedRow(
        row=row,
        recipe=recipe,
        shape=full_batch(row),
        device="Tesla T4",
        script=scripts.fitcheck(row),
        readings=readings_of(row),
        step_s=row["speed"]["step_s"],
    )
