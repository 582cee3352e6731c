"""The process in which gptqmodel works: ``python -m workbench.export.gptq_worker quantize|measure ...``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch

# Weights in a group that share a scale: the widest that divides every layer's input.
GROUPS = (128, 64, 32)


def quantize(merged: Path, target: Path, to: str, rows: Path) -> None:
    """Fit a merged model's weights to stored rows and save them in 4 bits."""
    from gptqmodel import GPTQModel, QuantizeConfig
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(merged)
    group = choose_group(config.hidden_size, config.intermediate_size)
    kind = {"method": "awq", "format": "gemm"} if to == "awq" else {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPTQModel.load(str(merged), QuantizeConfig(bits=4, group_size=group, **kind), device=device)
    with np.load(rows) as stored:
        tokens = [stored[name].tolist() for name in sorted(stored.files)]
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in tokens], batch_size=1)
    model.save(str(target))


def choose_group(*widths: int) -> int:
    """Return the widest group that divides all widths, or -1 (a whole row) where none does."""
    return next((group for group in GROUPS if all(width % group == 0 for width in widths)), -1)


def measure(folder: Path, rows: Path, out: Path) -> None:
    """Let transformers read the folder, and store what it says of the rows."""
    from .grade import load_rows, measure_reader
    from .readers import folder_reader

    measured = measure_reader(folder_reader(folder), load_rows(rows))
    np.savez(out, **{name: np.asarray(value) for name, value in _fields(measured).items()})  # type: ignore[arg-type]  # stubs take arrays for the flag


def _fields(measured: object) -> dict[str, object]:
    return {field.name: getattr(measured, field.name) for field in dataclasses.fields(measured)}  # type: ignore[arg-type]


def main(arguments: list[str]) -> int:
    """Run one of the two."""
    verb, *rest = arguments
    if verb == "quantize":
        quantize(Path(rest[0]), Path(rest[1]), rest[2], Path(rest[3]))
    else:
        measure(Path(rest[0]), Path(rest[1]), Path(rest[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
