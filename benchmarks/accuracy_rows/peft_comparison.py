"""PEFT's method comparison: Llama-3.2-3B on MetaMathQA, a plain loop on an L40S, batches padded to the longest.

The headline peak of these rows belongs to generating 50 answers at once. What is graded is the 99th percentile of the
memory reserved after a training step, which the row's record recommends.
"""

from __future__ import annotations

from typing import Any

from workbench.recipe import Recipe

from . import scripts
from .row import MappedRow, Row, UnmappedRow, full_batch, readings_of

# Full batches of the longest samples: the run cuts at 768 tokens and sorts nothing away.
_TORCH = {"2.13": "2.13.0", "2.9.": "2.9.0", "2.7.": "2.7.1"}


def map_row(row: Row) -> MappedRow | UnmappedRow:
    """Return the row as a Recipe, or why not."""
    adapter = _adapter(row)
    if isinstance(adapter, str):
        return UnmappedRow(row, adapter)
    recipe = Recipe.from_dict(
        {
            "model": {"name_or_path": row["model_id"], "dtype": "bfloat16"},
            "data": {"max_length": row["seq_len"]},
            "adapter": adapter,
            "training": {
                "per_device_train_batch_size": row["micro_batch_size"],
                "gradient_accumulation_steps": row["grad_accum"],
                "optim": "adamw_torch",
                "learning_rate": 1e-4,
                "weight_decay": 0.1,
                "mixed_precision": "no",
            },
            "evaluation": {"split": "none"},
            "hardware": {
                "torch_version": next((v for k, v in _TORCH.items() if f"torch {k}" in row["versions"]), None)
            },
        }
    )
    return MappedRow(
        row=row,
        recipe=recipe,
        shape=full_batch(row, padded=True),
        device="NVIDIA L40S",
        script=scripts.PLAIN,
        readings=readings_of(row),
        step_s=None,
        differences=(
            "the counter is a percentile of what is reserved after a step, with the cache emptied every 10 steps: "
            "below the highest moment of a full batch of 768 tokens, which most batches are far from",
        ),
    )


def _adapter(row: Row) -> dict[str, Any] | str:
    """Return the adapter part of the Recipe, or the reason why there is none."""
    if row["method"] == "full":
        return {"method": "none"}
    lora = row["lora"]
    if row["method"] != "lora" or lora is None:
        return f"the Recipe has LoRA and full fine-tuning, not {row['method'].removeprefix('other ').strip('()')}"
    if row["optimizer"].startswith("lora-fa"):
        return "LoRA-FA's optimizer freezes the A matrices and keeps projections; the Recipe has no such optimizer"
    if lora.get("use_bdlora"):
        return "block-diagonal LoRA is not in the Recipe"
    return {
        "r": lora["r"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": lora["target_modules"],
        "use_dora": lora["use_dora"],
        "use_rslora": lora["use_rslora"],
        "autocast_adapter_dtype": lora["adapter_dtype"] == "fp32",
    }
