"""Which family a published row belongs to, and therefore how it becomes a Recipe."""

from __future__ import annotations

from collections.abc import Callable

from workbench.components.catalogue import find_row

from . import bert, fitcheck, fms, litgpt, optimum, peft_comparison, qwen, swift
from .row import MappedRow, Row, UnmappedRow

Mapper = Callable[[Row], "MappedRow | UnmappedRow"]

_FAMILIES: tuple[tuple[str, Mapper], ...] = (
    ("plain PyTorch loop, method_comparison", peft_comparison.map_row),
    ("plain PyTorch loop", fitcheck.map_row),
    ("fms-hf-tuning", fms.map_row),
    ("LitGPT", litgpt.map_row),
    ("HF Trainer", bert.map_row),
    ("ms-swift", swift.map_row),
    ("Qwen finetune.py", qwen.map_row),
    ("optimum-benchmark", optimum.map_row),
)


def map_row(row: Row) -> MappedRow | UnmappedRow:
    """Return a row as a Recipe with its batch, device and script, or the reason why that cannot be done."""
    if row["n_gpus"] != 1 or row["sharding"] != "none":
        how = "" if row["sharding"] == "none" else f" ({row['sharding']})"
        return UnmappedRow(row, f"runs on {row['n_gpus']} GPUs{how}; this estimate is of one device")
    for prefix, mapper in _FAMILIES:
        if row["framework"].startswith(prefix):
            mapped = mapper(row)
            if (
                isinstance(mapped, MappedRow)
                and mapped.recipe.model.config is None
                and find_row(row["model_id"]) is None
            ):
                return UnmappedRow(row, f"the config of {row['model_id']} is not in the catalogue")
            return mapped
    return UnmappedRow(row, f"no mapping for the framework {row['framework']!r}")
