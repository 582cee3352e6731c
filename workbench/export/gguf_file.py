"""GGUF: one file for llama.cpp and what is built on it, written with the ``gguf`` package that owns the format.

Tensors are read, quantized and written one after the other, so that a model needs little memory beside its largest
tensor. Names come from the package's own table; what is added here is the order of rotary weights, which llama.cpp
expects interleaved in models of the llama family.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ExportError
from ..events import Cancel
from .gguf_tokenizer import add_tokenizer

FILE_NAME = "model.gguf"

# transformers' name -> GGUF's. Mistral is a llama to llama.cpp.
ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
# Their rotary halves lie one behind the other in transformers and interleaved in GGUF; Qwen's stay as they are.
INTERLEAVED = ("llama", "mistral")
ROPE_TYPES = ("default", "linear", "llama3")

# Names of the package for --to gguf-NAME: what weights are stored as, and the file's own word for it.
KINDS = {
    "gguf-q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "gguf-q4_0": ("Q4_0", "MOSTLY_Q4_0"),
    "gguf-q4_1": ("Q4_1", "MOSTLY_Q4_1"),
    "gguf-f16": ("F16", "MOSTLY_F16"),
    "gguf-bf16": ("BF16", "MOSTLY_BF16"),
}
# The output head (and the embeddings tied to it) lose most by 4 bits; llama.cpp keeps them in Q6_K, which the package
# cannot write, so they get the next wider type.
HEAD_TYPE = "Q8_0"
HEADS = ("output.weight", "token_embd.weight")


@dataclass(frozen=True)
class _Planned:
    """One tensor of the file: its name, where it is read, and what it is stored as."""

    name: str
    file: Path
    key: str
    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType


def require_mappable(config: Any) -> None:
    """Refuse a model that GGUF has no place for here, before anything is merged.

    Raises:
        ExportError: The architecture or its positions cannot be mapped.
    """
    if config.model_type not in ARCHITECTURES:
        raise ExportError(
            f"A model of type {config.model_type!r} cannot be written as GGUF; {', '.join(ARCHITECTURES)} can. "
            "Export it as merged, and convert that with llama.cpp's own convert_hf_to_gguf.py."
        )
    rope = _rope(config)
    if rope["rope_type"] not in ROPE_TYPES:
        raise ExportError(
            f"Rotary positions of type {rope['rope_type']!r} cannot be written as GGUF; {', '.join(ROPE_TYPES)} can. "
            "Export it as merged, and convert that with llama.cpp's own convert_hf_to_gguf.py."
        )


def write_gguf(merged: Path, target: Path, kind: str, name: str, cancel: Cancel | None = None) -> Path:
    """Write ``model.gguf`` from a merged model.

    Args:
        merged: Folder with safetensors, ``config.json`` and the tokenizer's files.
        target: An existing folder.
        kind: One of ``KINDS``.
        name: What the model is called in the file.
        cancel: Looked at between the tensors.

    Raises:
        ExportError: The model or its tokenizer cannot be mapped.
        Cancelled: The user cancelled.
    """
    import gguf
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(merged)
    require_mappable(config)
    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[config.model_type])
    path = target / FILE_NAME
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    try:
        _add_metadata(writer, config, kind, name)
        add_tokenizer(writer, merged, config.vocab_size)
        planned = list(_plan(merged, config, architecture, KINDS[kind][0]))
        factors = _rope_factors(config)
        if factors is not None:
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        for tensor in planned:
            stored = _stored_shape(tensor)
            writer.add_tensor_info(
                tensor.name,
                stored,
                _stored_dtype(tensor),
                math.prod(stored) * _stored_dtype(tensor).itemsize,
                tensor.kind,
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for tensor in planned:
            if cancel is not None:
                cancel.check()
            writer.write_tensor_data(_read(tensor, config))
    finally:
        writer.close()
    return path


def _add_metadata(writer: Any, config: Any, kind: str, name: str) -> None:
    import gguf

    rope, head = _rope(config), _head_dim(config)
    writer.add_name(name)
    writer.add_file_type(getattr(gguf.LlamaFileType, KINDS[kind][1]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _plan(merged: Path, config: Any, architecture: Any, kind: str) -> Iterator[_Planned]:
    """Yield the tensors of the file in the order they are written.

    Raises:
        ExportError: The package knows no name for a tensor.
    """
    import gguf
    from safetensors import safe_open

    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for file in sorted(merged.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - a reader, not a mapping
                if config.tie_word_embeddings and key == "lm_head.weight":
                    continue
                name = names.get_name(key, try_suffixes=(".weight", ".bias"))
                if name is None:
                    raise ExportError(
                        f"GGUF has no name for the tensor {key!r} of a {config.model_type} model. "
                        "Export it as merged, and convert that with llama.cpp's own convert_hf_to_gguf.py."
                    )
                shape = tuple(tensors.get_slice(key).get_shape())
                yield _Planned(name, file, key, shape, _kind_of(name, shape, kind))


def _kind_of(name: str, shape: tuple[int, ...], kind: str) -> Any:
    """Return what a tensor is stored as: vectors whole, rows that no block divides in 16 bits."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    if len(shape) == 1:
        return kinds.F32
    if kind.startswith("Q4") and name in HEADS:
        kind = HEAD_TYPE
    block = gguf.GGML_QUANT_SIZES[kinds[kind]][0]
    return kinds[kind] if shape[-1] % block == 0 else kinds.F16


def _stored_dtype(tensor: _Planned) -> np.dtype[Any]:
    plain = {"F32": np.float32, "F16": np.float16}
    return np.dtype(plain.get(tensor.kind.name, np.uint8))


def _stored_shape(tensor: _Planned) -> tuple[int, ...]:
    import gguf

    if _stored_dtype(tensor) != np.uint8:
        return tensor.shape
    return tuple(gguf.quant_shape_to_byte_shape(tensor.shape, tensor.kind))


def _read(tensor: _Planned, config: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's values in the order and type of the file."""
    import gguf
    from safetensors import safe_open

    with safe_open(tensor.file, framework="pt") as tensors:
        values = tensors.get_tensor(tensor.key).to(torch.float32).numpy()
    if config.model_type in INTERLEAVED:
        if ".attn_q." in tensor.name:
            values = interleave(values, config.num_attention_heads)
        elif ".attn_k." in tensor.name:
            values = interleave(values, config.num_key_value_heads)
    return np.ascontiguousarray(gguf.quantize(np.ascontiguousarray(values), tensor.kind))


def interleave(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Return rows (heads * head, ...) with the two halves of each head interleaved.

    Source:
        ``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py; transformers undoes it in
        ``LlamaTensorProcessor._reverse_permute_weights``.
    """
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: Any) -> dict[str, Any]:
    found = dict(config.rope_parameters or {})
    return {"rope_type": "default", "rope_theta": 10000.0} | found


def _rope_factors(config: Any) -> np.ndarray[Any, Any] | None:
    """Return what each rotary frequency is divided by (head / 2,), for the scaling of Llama 3.1, else None.

    Source:
        ``_compute_llama3_parameters`` of transformers' modeling_rope_utils.py; llama.cpp reads the factors from
        ``rope_freqs.weight``.
    """
    rope, head = _rope(config), _head_dim(config)
    if rope["rope_type"] != "llama3":
        return None
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head, 2) / head)
    turns = rope["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def read_head_dim(path: Path) -> int:
    """Return the width of a head that a GGUF file states."""
    import gguf

    reader = gguf.GGUFReader(path)
    architecture = reader.get_field("general.architecture").contents()
    return int(reader.get_field(f"{architecture}.attention.key_length").contents())
