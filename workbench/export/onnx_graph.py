"""ONNX: a graph from tokens to logits, traced by torch's own exporter, for onnxruntime and TensorRT."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..components.quiet import no_progress_bars
from ..errors import MissingPackageError

GRAPH_NAME = "model.onnx"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
# The exporter takes a size of one for a constant, so the example has two rows.
EXAMPLE_SHAPE = (2, 16)


class _Logits(nn.Module):
    """A causal model without a cache: two tensors in, one out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, S, vocabulary)."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def require_onnx() -> None:
    """Check that the packages are there, before anything is merged.

    Raises:
        MissingPackageError: One is not installed.
    """
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise MissingPackageError(name, "An ONNX export", "onnx")


def write_onnx(merged: Path, target: Path) -> None:
    """Write ``model.onnx`` and its weights (``model.onnx.data``) in float32.

    Args:
        merged: A folder with a causal model.
        target: An existing folder.
    """
    from transformers import AutoModelForCausalLM

    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, use_safetensors=True).eval()
    ids = (torch.arange(EXAMPLE_SHAPE[0] * EXAMPLE_SHAPE[1]) % model.config.vocab_size).reshape(EXAMPLE_SHAPE)
    mask = torch.ones_like(ids)
    mask[1, EXAMPLE_SHAPE[1] // 2 :] = 0  # padding is part of what the graph has to know
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with _quiet(), torch.no_grad():
        torch.onnx.export(
            _Logits(model),
            (ids, mask),
            str(target / GRAPH_NAME),
            dynamo=True,
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
            dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
            external_data=True,
            verbose=False,
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's progress, which it prints, and its remarks out of the notebook."""
    logger: Any = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
