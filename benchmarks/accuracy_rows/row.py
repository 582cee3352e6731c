"""What a published row says, in bytes and seconds, and what it becomes: a Recipe, a batch, a device, a script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.estimate.estimate import BatchShape
from workbench.estimate.script import Script
from workbench.recipe import Recipe
from workbench.units import GIB, MIB

Row = Mapping[str, Any]

UNIT_BYTES: dict[str, int] = {"bytes": 1, "MiB": MIB, "GiB": GIB, "GB(1e9)": 10**9}

# How the rows describe a counter, and what it is called here. Counters are graded apart: allocated bytes, reserved
# bytes and what nvidia-smi shows differ by gigabytes and by cause.
_COUNTERS: tuple[tuple[str, str], ...] = (
    ("max_memory_allocated", "allocated"),
    ("INCLUDING evaluation/generation", ""),  # The peak of generating 50 answers at once, not of training.
    ("99th percentile", "reserved p99"),
    ("mean over training steps", ""),
    ("mean torch memory_allocated", ""),
    ("max_memory_reserved", "reserved"),
    ("peak_reserved_mib", "reserved"),
    ("process_mib", "process"),
    ("cuda_context_mib", "context"),
    ("after_load_allocated_mib", "allocated: load"),
    ("peak_forward_mib", "allocated: forward"),
    ("peak_backward_mib", "allocated: backward"),
    ("peak_optimizer_mib", "allocated: optimizer"),
    ("NVML memory used", "process"),
    ("NVML after first CUDA op", "context"),
    ("NVML after loading", ""),
    ("nvidia-smi peak", "nvidia-smi"),
    ("largest torch.cuda.memory_allocated at HF Trainer stage ends", "allocated: rest"),
)


@dataclass(frozen=True)
class Reading:
    """One counter that somebody read.

    Attributes:
        counter: ``"allocated"``, ``"reserved"``, ``"process"`` (reserved plus context), ``"nvidia-smi"``,
            ``"context"``, ``"reserved p99"``, or ``"allocated: PHASE"``.
        num_bytes: The value.
    """

    counter: str
    num_bytes: int


@dataclass(frozen=True)
class MappedRow:
    """A published row as the estimator takes it.

    Attributes:
        row: The row as published.
        recipe: Its settings.
        shape: Its largest micro-batch.
        device: Name for ``find_device``, with a capacity where the row's card differs from the table's.
        script: What its training script does otherwise than our trainer.
        readings: Its counters; empty where the row is about speed only.
        step_s: Measured seconds per optimizer step, or None.
        differences: What the Recipe and the script cannot express, each a cause that can move the prediction.
    """

    row: Row
    recipe: Recipe
    shape: BatchShape
    device: str
    script: Script = field(default_factory=Script)
    readings: tuple[Reading, ...] = ()
    step_s: float | None = None
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnmappedRow:
    """A row that cannot be expressed, with the reason."""

    row: Row
    reason: str


def readings_of(row: Row) -> tuple[Reading, ...]:
    """Return the counters of a row that say something about training memory, each in bytes.

    A counter whose unit or kind the row does not know is left out: it cannot be graded.
    """
    found = [_reading(row["peak_mem_value"], row["peak_mem_unit"], row["peak_mem_kind"])]
    found += [_reading(item["value"], item["unit"], item["kind"]) for item in row.get("other_memory") or ()]
    return tuple(reading for reading in found if reading is not None)


def _reading(value: float | None, unit: str | None, kind: str | None) -> Reading | None:
    if value is None or unit not in UNIT_BYTES or kind is None:
        return None
    counter = next((name for text, name in _COUNTERS if text in kind), "")
    return Reading(counter, round(value * UNIT_BYTES[unit])) if counter else None


def grades_memory(row: Row) -> bool:
    """Whether the row's author of record recommends it for memory, as a value or as an out-of-memory check."""
    return any(text.startswith(("memory", "fit/OOM")) for text in row["recommended_for"])


def grades_speed(row: Row) -> bool:
    """Whether the row is recommended for speed."""
    return "speed" in row["recommended_for"]


def source_name(row: Row) -> str:
    """Return a short name of where the row comes from, the key that errors are grouped by."""
    source = str(row["source"])
    family = source.split(" ")[0].rstrip(":")
    if family == "foundation-model-stack/fms-acceleration":
        table = source.split("benchmarks/")[1].split(" ")[0]
        return f"fms-acceleration {table}"
    if family == "Lightning-AI/litgpt":
        return "LitGPT config_hub"
    if family == "fitcheck-llm":
        return f"fitcheck-llm T4, {row['versions'].split('+')[0]}"
    return {
        "QwenLM/Qwen": "Qwen README",
        "modelscope/ms-swift": "ms-swift benchmark",
        "mosaicml/llm-foundry": "llm-foundry benchmark",
        "huggingface/peft": "peft method_comparison",
        "huggingface/transformers": "transformers docs, BERT on V100",
        "huggingface/optimum-benchmark": "optimum-benchmark",
    }.get(family, family)


def full_batch(row: Row, length: int | None = None, *, padded: bool = False) -> BatchShape:
    """Return the shape of the row's largest micro-batch: every sample at ``length``."""
    tokens = int(length or row["seq_len"])
    return BatchShape(
        batch_size=int(row["micro_batch_size"]),
        length=tokens,
        mean_length=float(tokens),
        mean_real_tokens=float(tokens),
        padded=padded,
        source="max_length",
    )
