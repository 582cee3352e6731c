"""Independent readers of exports: transformers for folders and GGUF files, onnxruntime for ONNX graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..components.quantization import say_once
from ..components.quiet import no_progress_bars
from ..components.smollm2 import no_gguf_bar
from ..events import Cancel
from .gguf_file import FILE_NAME, read_head_dim
from .grade import Reader
from .onnx_graph import GRAPH_NAME


@contextmanager
def reader_of(to: str, folder: Path, merged: Path, cancel: Cancel | None = None) -> Iterator[tuple[Reader, str]]:
    """Yield what reads an export, and its name.

    Args:
        to: The export's format.
        folder: The export.
        merged: The merged model; of it only the config is read, for what a GGUF reader does not look at.
        cancel: Looked at while a GGUF file is read.
    """
    with no_progress_bars():
        if to == "onnx":
            yield _onnx_reader(folder), "onnxruntime"
        elif to.startswith("gguf"):
            yield _reader(_read_gguf(folder, merged, cancel)), "transformers, made whole (float32)"
        else:
            yield folder_reader(folder), "transformers"


def merged_reader(merged: Path) -> Reader:
    """Return what reads the merged model in float32: the measure of all exports."""
    from transformers import AutoModelForCausalLM

    with no_progress_bars():
        return _reader(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, use_safetensors=True))


def folder_reader(folder: Path) -> Reader:
    """Return what reads a folder as transformers users would: in the dtypes and with the kernels that it states."""
    return _reader(_read_folder(folder))


def _reader(model: Any) -> Reader:
    model.eval()

    def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        device = model.device
        logits: torch.Tensor = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
        return logits

    return read


def _read_folder(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    # Quantized weights are placed where they are read; a plain model stays on the CPU.
    say_once("bitsandbytes.autograd._functions")
    is_quantized = '"quantization_config"' in (folder / "config.json").read_text(encoding="utf-8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = {"device_map": {"": device}} if is_quantized else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", use_safetensors=True, **place)


def _read_gguf(folder: Path, merged: Path, cancel: Cancel | None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, gguf_file=FILE_NAME)
    # transformers 5.24 looks at neither: the width of a head stands in the file, the scaling of rotary positions as
    # factors that cannot be turned back into its settings.
    config.head_dim = read_head_dim(folder / FILE_NAME)
    config.rope_parameters = AutoConfig.from_pretrained(merged).rope_parameters
    with no_gguf_bar(cancel):
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE_NAME, config=config, dtype=torch.float32)


def _onnx_reader(folder: Path) -> Reader:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(folder / GRAPH_NAME), options, providers=["CPUExecutionProvider"])

    def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
        return torch.from_numpy(found)

    return read
