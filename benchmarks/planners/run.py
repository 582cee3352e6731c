"""Run every planner on the mapped rows: one subprocess a planner, plain descriptions in, figures out."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy_rows import MappedRow
from workbench.components.source import find_source
from workbench.hardware import find_device
from workbench.units import GIB

from .environment import PLANNERS, Planner, planner_python

RUN_TIMEOUT_S = 300


@dataclass(frozen=True)
class PlannerFigure:
    """What one planner says of one row.

    Attributes:
        num_bytes: By counter; empty where the planner cannot express the row.
        fits: Its verdict, or None.
        reason: Why there is no figure.
        is_fitted: Whether its constants were fitted to rows of this source.
    """

    num_bytes: dict[str, int]
    fits: bool | None
    reason: str
    is_fitted: bool


def describe_run(mapped: MappedRow) -> dict[str, Any]:
    """Return a row in plain words that any planner's script can read, its config included."""
    recipe = mapped.recipe
    source = find_source(recipe, for_training=False)
    text = source.config.get_text_config()
    quantized = recipe.quantization.bits
    method = "full" if recipe.adapter.method == "none" else "qlora" if quantized else "lora"
    targets = recipe.adapter.target_modules
    heads = int(text.num_attention_heads)
    return {
        "id": mapped.row["id"],
        "model_id": mapped.row["model_id"],
        "config": source.config.to_dict(),
        "num_parameters": mapped.row["params"] if isinstance(mapped.row["params"], int) else None,
        "architecture": {
            "hidden_size": text.hidden_size,
            "num_hidden_layers": text.num_hidden_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "intermediate_size": getattr(text, "intermediate_size", None)
            or getattr(text, "ffn_hidden_size", 4 * text.hidden_size),
            "vocab_size": text.vocab_size,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "tie_word_embeddings": bool(getattr(source.config, "tie_word_embeddings", False)),
        },
        "method": method,
        "double_quant": recipe.quantization.bnb_4bit_use_double_quant,
        "dtype": {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "auto": "bf16"}[recipe.model.dtype],
        "lora_r": recipe.adapter.r,
        "lora_targets": [targets] if isinstance(targets, str) else list(targets),
        "batch_size": mapped.shape.batch_size,
        "length": mapped.shape.length,
        "checkpointing": recipe.training.gradient_checkpointing,
        "attention": recipe.model.attn_implementation,
        "optimizer": recipe.training.optim,
        "capacity_gib": find_device(mapped.device).capacity_bytes / GIB,
        "device": mapped.device,
    }


def run_planners(rows: Iterable[MappedRow]) -> dict[str, dict[str, PlannerFigure]]:
    """Return ``{planner: {row id: figure}}``; a planner that does not install has one reason for every row."""
    chosen = list(rows)
    runs = [describe_run(mapped) for mapped in chosen]
    return {planner.name: _run_one(planner, chosen, runs) for planner in PLANNERS}


def _run_one(planner: Planner, rows: list[MappedRow], runs: list[dict[str, Any]]) -> dict[str, PlannerFigure]:
    fitted = {row.row["id"]: row.row["source"].startswith(planner.fitted_on or ("\0",)) for row in rows}
    try:
        python = planner_python(planner)
        result = subprocess.run(
            [str(python), str(planner.script)],
            input=json.dumps(runs, default=str),
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        if result.returncode:
            raise RuntimeError(f"{planner.name} failed: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")
        figures = json.loads(result.stdout)
    except (RuntimeError, subprocess.TimeoutExpired, OSError, ValueError) as error:
        return {key: PlannerFigure({}, None, str(error), fitted[key]) for key in fitted}
    return {
        key: PlannerFigure(
            {name: int(value) for name, value in figure.get("num_bytes", {}).items()},
            figure.get("fits"),
            figure.get("reason", ""),
            fitted[key],
        )
        for key, figure in figures.items()
    }
