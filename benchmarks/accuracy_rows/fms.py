"""fms-acceleration's tables: HF's Trainer through TRL, packed to 4096 tokens, on A100-80GB.

Its ``foak`` rows replace RMSNorm, rotary embedding and cross entropy (and LoRA products on quantised bases) by fused
Triton kernels; ``liger`` also fuses the output head with the loss. Its GPTQ rows keep int4 weights and scales.
"""

from __future__ import annotations

import re
from typing import Any

from workbench.recipe import Recipe

from . import scripts
from .row import MappedRow, Row, UnmappedRow, full_batch, readings_of

_REENTRANT = "checkpointing was left at the Trainer's default of that time (reentrant)"


def map_row(row: Row) -> MappedRow | UnmappedRow:
    """Return the row as a Recipe, or why not."""
    if row["seq_len"] is None:
        return UnmappedRow(row, "the lengths of its samples are not published (padded to the longest, or padding-free)")
    quantization = row["quantization"] or ""
    gptq = quantization.startswith("GPTQ")
    loss = row["loss_impl"]
    fused = loss.startswith(("unsloth", "Liger"))
    half = "bfloat16" if "bf" in row["weight_dtype"] else "float16"
    recipe = Recipe.from_dict(
        {
            "model": {"name_or_path": row["model_id"], "dtype": half, "attn_implementation": "flash_attention_2"},
            # TRL of that time joined samples and did not tell the model where they end: full sequences without a mask.
            "data": {"max_length": row["seq_len"]},
            "adapter": _adapter(row),
            "quantization": {
                "load_in_4bit": bool(quantization) and not gptq,
                "bnb_4bit_use_double_quant": "double quant" in quantization,
                "prepare_model_for_kbit_training": "prepare_model_for_kbit" in quantization,
            },
            "training": {
                "per_device_train_batch_size": row["micro_batch_size"],
                "gradient_accumulation_steps": row["grad_accum"],
                "optim": "adamw_torch",
                "learning_rate": 2e-5,
                "mixed_precision": _mixed_precision(row["compute_dtype"]),
                "gradient_checkpointing": True,
            },
            "evaluation": {"split": "none"},
            "hardware": {"torch_version": _version(row, "torch")},
        }
    )
    differences = [_REENTRANT]
    if gptq:
        differences.append("GPTQ's Triton products are stood in for by their storages: no step time")
    return MappedRow(
        row=row,
        recipe=recipe,
        shape=full_batch(row),
        device="NVIDIA A100-SXM4-80GB",
        script=scripts.fms(row, is_fused=fused, is_liger=loss.startswith("Liger"), is_gptq=gptq),
        readings=readings_of(row),
        step_s=None if gptq else _step_s(row),
        differences=tuple(differences),
    )


def _adapter(row: Row) -> dict[str, Any]:
    if row["method"] == "full":
        return {"method": "none"}
    lora = row["lora"]
    return {
        "r": lora["r"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        # The list is shared by all models of these tables; c_attn is a module of GPT-2's kind only.
        "target_modules": [name for name in lora["target_modules"] if name != "c_attn"],
    }


def _mixed_precision(compute: str) -> str:
    if "no autocast" in compute or compute == "fp16":
        return "no"
    return "bf16" if compute.startswith("bf16") else "fp16"


def _version(row: Row, package: str) -> str | None:
    found = re.search(rf"(?:^|\s){package} ([0-9.]+)", row["versions"] or "")
    return found.group(1).rstrip(".") if found else None


def _step_s(row: Row) -> float | None:
    speed = row["speed"]
    if not speed or not speed.get("n_steps"):
        return None
    return float(speed["train_runtime_s"] / speed["n_steps"])
