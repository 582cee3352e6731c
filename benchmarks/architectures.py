"""Which architectures of the installed transformers can be estimated: every config class is traced with its defaults.

``python -m benchmarks.architectures`` traces what is not stored yet (``--again``: everything, ``--only NAME``: those)
and writes ``benchmarks/data/architectures.json`` and ``docs/architectures.md``. Width is the default; depth too, where
equal layers are traced once. A class that needs longer than the limit is tried again with few layers, then with short
samples (those that loop over time take an operator for each token), and marked so.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers

from workbench import Recipe, estimate_run, find_device
from workbench.components.task import TASKS
from workbench.errors import WorkbenchError
from workbench.estimate.run import clear_caches

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "benchmarks" / "data" / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"
DEVICE = "NVIDIA A100-SXM4-40GB"
LENGTH = 128
LIMIT_S = 60
FEW_LAYERS = 4
SHORT = 16
# Lengths that a default config allows only: the product of Reformer's axial positions.
LENGTHS: Mapping[str, int] = {"reformer": 4096}

COHERE_ROPE = {
    "rope_type": "default",
    "rope_theta": 50_000,
    "mrope_interleaved": True,
    "mrope_section": [24, 20, 20],
}
QWEN4_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
}
# Fields that a default config leaves empty, so that transformers itself cannot build the model. The values are those of
# the released checkpoint that is named.
COMPLETED: Mapping[str, tuple[dict[str, Any], str]] = {
    "deepseek_v2": ({"num_experts_per_tok": 6, "n_routed_experts": 64}, "deepseek-ai/DeepSeek-V2-Lite"),
    "dots1": (
        {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
        "rednote-hilab/dots.llm1.base",
    ),
    "hunyuan_v1_dense": ({"head_dim": 128}, "tencent/Hunyuan-7B-Instruct"),
    "hunyuan_v1_moe": ({"head_dim": 128}, "tencent/Hunyuan-A13B-Instruct"),
    "ministral": ({"head_dim": 128}, "mistralai/Ministral-8B-Instruct-2410"),
    "nemotron": ({"num_key_value_heads": 8, "head_dim": 128}, "nvidia/Minitron-8B-Base"),
    "dbrx": ({"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8}}, "databricks/dbrx-base"),
    "cohere_compass_text": (
        {"rope_parameters": {"full_attention": None, "sliding_attention": COHERE_ROPE}},
        "CohereLabs/North-Micro-Vision-Instruct",
    ),
    "qwen4_exp": ({"text_config": QWEN4_INDEXER}, "Qwen/Qwen4-Exp"),
    "qwen4_exp_text": (QWEN4_INDEXER, "Qwen/Qwen4-Exp"),
    "t5": ({"decoder_start_token_id": 0}, "google-t5/t5-small"),
    "longt5": ({"decoder_start_token_id": 0}, "google/long-t5-tglobal-base"),
    "esm": ({"vocab_size": 33, "pad_token_id": 1}, "facebook/esm2_t6_8M_UR50D"),
    "xmod": ({"default_language": "en_XX"}, "facebook/xmod-base"),
    "lfm2_moe": (
        {
            "num_hidden_layers": 24,
            "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        },
        "LiquidAI/LFM2-8B-A1B",
    ),
}  # fmt: skip
# As a language model an encoder needs this switch; transformers leaves it off.
AS_DECODER = {"is_decoder": True}


@dataclass(frozen=True)
class Row:
    """One config class in one task.

    Attributes:
        task: As ``model.task`` spells it.
        model_type: As ``config.json`` spells it.
        is_traced: Whether an estimate was made.
        note: What differs from the plain default; empty where nothing does.
        reason: Why there is no estimate; empty where there is one.
        num_parameters: Of the traced model; 0 without an estimate.
        elapsed_s: Seconds it took on the machine that wrote the file.
    """

    task: str
    model_type: str
    is_traced: bool
    note: str = ""
    reason: str = ""
    num_parameters: int = 0
    elapsed_s: float = 0.0


class TooSlowError(Exception):
    """An estimate took longer than the limit."""


def model_types(task: str) -> list[str]:
    """Return the model types of the installed transformers' mapping for a task."""
    from transformers.models.auto import modeling_auto

    return sorted(getattr(modeling_auto, f"{TASKS[task].mapping}_NAMES"))


def trace(task: str, model_type: str, *, limit_s: int = LIMIT_S) -> Row:
    """Estimate one default config; few layers where the whole takes longer than ``limit_s``."""
    values, note = _values(task, model_type)
    began = time.perf_counter()
    length = LENGTHS.get(model_type, LENGTH)
    if length != LENGTH:
        note = _joined(f"samples of {length} tokens", note)
    row = _try(task, model_type, values, (length, note), limit_s)
    if row.reason.startswith("slower"):
        few = {**values, "num_hidden_layers": FEW_LAYERS}
        row = _try(task, model_type, few, (length, _joined(f"{FEW_LAYERS} layers", note)), limit_s)
        if not row.is_traced:
            row = _try(task, model_type, values, (SHORT, _joined(f"samples of {SHORT} tokens", note)), limit_s)
    return Row(**{**asdict(row), "elapsed_s": round(time.perf_counter() - began, 1)})


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _values(task: str, model_type: str) -> tuple[dict[str, Any], str]:
    values: dict[str, Any] = {"model_type": model_type}
    notes = []
    if model_type in COMPLETED:
        fields, name = COMPLETED[model_type]
        values |= fields
        notes.append(f"{', '.join(fields)} of {name}")
    if task == "causal-lm":
        config = transformers.CONFIG_MAPPING[model_type]
        is_encoder = config in transformers.MODEL_FOR_MASKED_LM_MAPPING
        if is_encoder and not getattr(config, "is_encoder_decoder", False) and _is_off(config):
            values |= AS_DECODER
            notes.append("is_decoder")
    return values, _joined(*notes)


def _is_off(config: Any) -> bool:
    try:
        made = config()
    except Exception:  # a default that its own class refuses
        return False
    return getattr(made, "is_decoder", True) is False and not getattr(made, "is_encoder_decoder", False)


def _try(task: str, model_type: str, values: dict[str, Any], how: tuple[int, str], limit_s: int) -> Row:
    length, note = how
    recipe = Recipe.from_dict(
        {"model": {"name_or_path": model_type, "task": task, "config": values}, "data": {"max_length": length}}
    )
    before = signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(limit_s)
    try:
        estimate = estimate_run(recipe, find_device(DEVICE))
        return Row(task, model_type, True, note, num_parameters=estimate.num_parameters)
    except (WorkbenchError, TooSlowError, NotImplementedError, ValueError, RuntimeError, AttributeError) as error:
        slow = isinstance(error, TooSlowError) or "TooSlowError" in str(error)
        reason = f"slower than {limit_s} s" if slow else " ".join(str(error).split())
        return Row(
            task, model_type, False, note, reason.replace(" Try model.attn_implementation=eager, or another model.", "")
        )
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        clear_caches()
        gc.collect()


def _too_slow(*_: Any) -> None:
    raise TooSlowError("too slow")


def read_rows() -> dict[tuple[str, str], Row]:
    """Return what is stored, by task and model type."""
    if not STORED.is_file():
        return {}
    rows = [Row(**values) for values in json.loads(STORED.read_text(encoding="utf-8"))["rows"]]
    return {(row.task, row.model_type): row for row in rows}


def write_rows(rows: Iterable[Row]) -> None:
    """Write the JSON and the page."""
    ordered = sorted(rows, key=lambda row: (list(TASKS).index(row.task), row.model_type))
    classes = {task: len(model_types(task)) for task in TASKS}
    facts = {"transformers": transformers.__version__, "classes": classes, "rows": [asdict(row) for row in ordered]}
    STORED.parent.mkdir(exist_ok=True)
    STORED.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render_page(ordered, transformers.__version__, classes), encoding="utf-8")


def render_page(rows: list[Row], version: str, classes: Mapping[str, int]) -> str:
    """Return ``docs/architectures.md``; ``classes`` has how many of a task that transformers knows."""
    lines = [
        "# Architectures",
        "",
        f"Every config class of transformers {version} that a task knows, built with its defaults and estimated as",
        f"a LoRA run on an {DEVICE} with samples of {LENGTH} tokens: `python -m benchmarks.architectures`.",
        "Experts are traced at a perfect balance of their tokens; what a model reads from the device to choose its way",
        "is taken as expected. A model's own Python is never executed here. Some defaults leave fields empty, so that",
        "transformers itself cannot build them; the note names the checkpoint whose published values fill them.",
        "",
        "The share is that of the classes that were tried.",
        "",
        "| task | classes | tried | estimated | share | not tried |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for task in TASKS:
        own = [row for row in rows if row.task == task]
        done, known = sum(row.is_traced for row in own), classes[task]
        share = f"{100 * done / len(own):.1f} %" if own else ""
        lines.append(f"| {task} | {known} | {len(own)} | {done} | {share} | {known - len(own)} |")
    for task in TASKS:
        own = [row for row in rows if row.task == task]
        if not own:
            continue
        lines += ["", f"## {task}", "", "| model_type | estimated | parameters | note |", "| --- | --- | ---: | --- |"]
        for row in own:
            count = f"{row.num_parameters:,}" if row.is_traced else ""
            note = row.note if row.is_traced else row.reason
            text = note.replace("|", "\\|").replace("<", "&lt;")[:220]
            lines.append(f"| {row.model_type} | {'yes' if row.is_traced else 'no'} | {count} | {text} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Trace and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=[*TASKS, "all"], default="all")
    parser.add_argument("--only", nargs="*", default=[], help="model types")
    parser.add_argument("--again", action="store_true", help="also what is stored")
    parser.add_argument("--failed", action="store_true", help="also what is stored as not traced")
    parser.add_argument("--limit-s", type=int, default=LIMIT_S)
    options = parser.parse_args(arguments)
    rows = read_rows()
    for task in TASKS if options.task == "all" else [options.task]:
        for model_type in model_types(task):
            stored = rows.get((task, model_type))
            wanted = stored is None or options.again or (options.failed and not stored.is_traced)
            if options.only:
                wanted = model_type in options.only
            if not wanted:
                continue
            row = trace(task, model_type, limit_s=options.limit_s)
            rows = read_rows() | {(task, model_type): row}  # another process may have written others
            write_rows(rows.values())
            print(f"{task} {model_type}: {'traced' if row.is_traced else row.reason} ({row.elapsed_s} s)", flush=True)
    for task in TASKS:
        own = [row for key, row in rows.items() if key[0] == task]
        done = sum(row.is_traced for row in own)
        print(f"{task}: {done} of {len(own)} ({100 * done / max(1, len(own)):.1f} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
