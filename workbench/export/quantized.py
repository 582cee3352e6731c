"""Folders that transformers loads with quantized weights: bitsandbytes in 8 and 4 bits, torchao in 8 and 4."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..components.quiet import no_progress_bars
from ..errors import ExportError, MissingPackageError

PACKAGES = {
    "bnb-8bit": "bitsandbytes",
    "bnb-4bit": "bitsandbytes",
    "torchao-int8": "torchao",
    "torchao-int4": "torchao",
}
EXTRAS = {"bitsandbytes": "quantization", "torchao": "torchao"}
# Weights in a block that share a scale.
INT4_GROUP = 128


def require_quantizer(to: str) -> None:
    """Check what a format needs, before anything is merged.

    Raises:
        MissingPackageError: Its package is not installed.
        ExportError: It needs a GPU that is not here.
    """
    package = PACKAGES[to]
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(package, f"An export to {to}", EXTRAS[package])
    if to == "torchao-int4" and not torch.cuda.is_available():
        raise ExportError(
            "torchao packs 4-bit weights for a GPU's kernels and saves no other layout, and there is no GPU here. "
            "Export torchao-int8, bnb-4bit or gptq."
        )


def write_quantized(merged: Path, target: Path, to: str) -> None:
    """Quantize a merged model while it is loaded, and save it.

    Args:
        merged: A folder with a causal model.
        target: An existing folder.
        to: One of ``PACKAGES``.
    """
    from transformers import AutoModelForCausalLM

    place = "cuda" if torch.cuda.is_available() else "cpu"
    with no_progress_bars(), _quiet_torchao():
        # What is not quantized (embeddings, norms, the head) is kept in 16 bits, as such folders are on the hub.
        model = AutoModelForCausalLM.from_pretrained(
            merged,
            quantization_config=_config(to),
            dtype=torch.bfloat16,
            device_map={"": place},
            use_safetensors=True,
        )
        model.save_pretrained(target)


def _config(to: str) -> Any:
    import transformers

    if to == "bnb-8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    if to == "bnb-4bit":
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    if to == "torchao-int8":
        return transformers.TorchAoConfig(Int8WeightOnlyConfig())
    return transformers.TorchAoConfig(
        Int4WeightOnlyConfig(group_size=INT4_GROUP, int4_packing_format="tile_packed_to_4d")
    )


@contextmanager
def _quiet_torchao() -> Iterator[None]:
    """Keep torchao from listing, while it is imported, the kernels for GPUs that it cannot load here."""
    logger = logging.getLogger("torchao")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
