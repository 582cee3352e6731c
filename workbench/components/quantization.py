"""Frozen base weights in 8 or 4 bits, through transformers' own bitsandbytes integration."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import MissingPackageError
from ..recipe import Recipe
from .precision import Precision
from .task import CLASSIFICATION, head_modules


def quantization_config(recipe: Recipe, precision: Precision, skip_modules: Sequence[str] = ()) -> Any | None:
    """Return transformers' ``BitsAndBytesConfig`` for the Recipe, or None where nothing is quantized.

    Args:
        recipe: The settings.
        precision: Dtypes of the run, with the ``weight_dtype`` that the weights are loaded in; 4-bit products are
            computed in it where there is no autocast.
        skip_modules: Modules that stay unquantized, from ``skipped_modules``; empty leaves the choice to transformers.

    Raises:
        MissingPackageError: bitsandbytes is not installed.
    """
    wanted = recipe.quantization
    if not wanted.bits:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingPackageError("bitsandbytes", f"A base in {wanted.bits} bits", "quantization")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=wanted.load_in_4bit,
        load_in_8bit=wanted.load_in_8bit,
        bnb_4bit_quant_type=wanted.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=wanted.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=precision.autocast_dtype or precision.weight_dtype,
        llm_int8_threshold=wanted.llm_int8_threshold,
        llm_int8_skip_modules=list(skip_modules) or None,
    )


def skipped_modules(recipe: Recipe, model: nn.Module) -> list[str]:
    """Return the modules that stay unquantized: the output head, what is tied to it, and those the Recipe names.

    transformers drops its own list as soon as one is given, which would quantize the head, so both are joined here.
    """
    from transformers.quantizers.base import get_keys_to_not_convert

    # A classification head is trained whole beside the adapter, so it has to stay unpacked.
    heads = head_modules(model) if recipe.model.task == CLASSIFICATION else []
    return sorted({*get_keys_to_not_convert(model), *recipe.quantization.llm_int8_skip_modules, *heads})


def quantize_meta_model(model: nn.Module, config: Any, precision: Precision) -> None:
    """Put the quantized Linear classes where a real load puts them, without storage.

    Their weights stay unpacked until ``pack_meta_weights``: PEFT's DoRA reads them while it attaches.

    Args:
        model: A model on the ``meta`` device.
        config: A ``BitsAndBytesConfig``.
        precision: Dtypes of the run; the packed weights unpack to its ``weight_dtype``.
    """
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map={"": "cpu"})
    quantizer.postprocess_model(model)
    for module in _quantized_modules(model):
        shape = (module.out_features, module.in_features)
        stand_in = nn.Parameter(torch.empty(shape, dtype=precision.weight_dtype, device="meta"), requires_grad=False)
        # PEFT reads these two from the weight of a 4-bit module.
        stand_in.quant_type = config.bnb_4bit_quant_type  # type: ignore[attr-defined]
        stand_in.compress_statistics = config.bnb_4bit_use_double_quant  # type: ignore[attr-defined]
        module.weight = stand_in


def pack_meta_weights(model: nn.Module, config: Any) -> None:
    """Give quantized meta modules weights of the packed shape and dtype.

    ``(in * out / 2, 1)`` uint8 for 4 bits, ``(out, in)`` int8 for 8 bits.
    """
    import bitsandbytes

    for module in _quantized_modules(model):
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            packed = torch.empty(
                (module.in_features * module.out_features + 1) // 2, 1, dtype=torch.uint8, device="meta"
            )
            module.weight = bitsandbytes.nn.Params4bit(
                packed,
                requires_grad=False,
                quant_type=config.bnb_4bit_quant_type,
                compress_statistics=config.bnb_4bit_use_double_quant,
                bnb_quantized=True,
            )
        else:
            packed = torch.empty(module.out_features, module.in_features, dtype=torch.int8, device="meta")
            module.weight = bitsandbytes.nn.Int8Params(packed, requires_grad=False, has_fp16_weights=False)


def say_once(logger_name: str) -> None:
    """Let a logger say each thing once: bitsandbytes warns of the same cast in every layer of every step."""
    logger = logging.getLogger(logger_name)
    if not any(isinstance(found, _OncePerMessage) for found in logger.filters):
        logger.addFilter(_OncePerMessage())


class _OncePerMessage(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        is_new = record.getMessage() not in self._said
        self._said.add(record.getMessage())
        return is_new


def _quantized_modules(model: nn.Module) -> list[Any]:
    import bitsandbytes

    kinds = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
    return [module for module in model.modules() if isinstance(module, kinds)]


def prepare_for_training(recipe: Recipe, model: nn.Module) -> nn.Module:
    """Freeze a quantized base and, where the Recipe says so, cast what is not quantized to float32.

    Checkpointing is left alone: it has a switch of its own (PEFT's function would turn it on).
    """
    if not recipe.quantization.bits:
        return model
    if recipe.quantization.bits == 8:
        say_once("bitsandbytes.autograd._functions")
    if recipe.quantization.prepare_model_for_kbit_training:
        from peft import prepare_model_for_kbit_training

        return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    for parameter in model.parameters():
        parameter.requires_grad = False
    return model
