"""The model that one rank of a tensor-parallel group runs: a share of the heads and of the feed-forward width.

Transformers cuts the projections of a layer by columns and rows (``base_model_tp_plan`` of a config), so that a rank
computes with its own heads and its own part of the feed-forward layer and the group adds up the results. A model with
that many heads and that width is the same computation: it is traced like any other.
"""

from __future__ import annotations

import copy
from typing import Any

from ..recipe import Recipe
from .tape import NO_LAYER, Tape

_HEADS = "num_attention_heads"
_KEYS = "num_key_value_heads"
_WIDTH = "intermediate_size"


def refuse_split(recipe: Recipe, config: Any, size: int) -> str:
    """Return why ``size`` devices cannot split this model, or an empty text.

    Args:
        recipe: The settings.
        config: Of the whole model.
        size: Tensor-parallel devices.
    """
    text = config.get_text_config()
    if recipe.quantization.bits:
        return f"weights in {recipe.quantization.bits} bits cannot be split; ddp gives each device all of them"
    if not getattr(text, "base_model_tp_plan", None):
        return f"transformers has no tensor-parallel plan for {text.model_type}"
    if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
        return "experts are spread in another way, which is not modelled"
    for name in (_HEADS, _KEYS, _WIDTH):
        value = getattr(text, name, None)
        if not isinstance(value, int) or value % size:
            return f"{name} is {value}, which {size} devices cannot share equally"
    return ""


def split_recipe(recipe: Recipe, config: Any, size: int) -> Recipe:
    """Return the Recipe of the model that one of ``size`` devices runs; see ``refuse_split``."""
    text = config.get_text_config()
    values = text.to_dict()
    values["head_dim"] = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in (_HEADS, _KEYS, _WIDTH):
        values[name] = values[name] // size
    return recipe.with_changes({"model.config": values})


def split_head(tape: Tape, size: int) -> Tape:
    """Return the tape of a rank that has its columns of the output head; logits are gathered and stay whole.

    Args:
        tape: Of the rank's model.
        size: Tensor-parallel devices.
    """
    heads = {index for index, name in enumerate(tape.module_names) if name.rsplit(".", 1)[-1] == "lm_head"}
    begin, _ = tape.segments()["first"]
    weights = {token for token in tape.events[:begin] if token >= 0 and tape.modules[token] in heads}
    known = {tape.sizes[token] for token in weights}
    states = sorted(token for token, category in tape.categories.items() if category == "optimizer_state")
    # State is made in the order of the parameters: the head's comes after the first of a layer, the embedding's before.
    first_of_layer = next((token for token in states if tape.layers[token] != NO_LAYER), None)
    late = {
        token
        for token in states
        if tape.layers[token] == NO_LAYER and first_of_layer is not None and token > first_of_layer
    }
    gradients = {
        token for token, name in tape.categories.items() if name == "gradient" and tape.modules[token] in heads
    }
    sizes = list(tape.sizes)
    for token in weights | gradients | late:
        if sizes[token] in known:
            sizes[token] //= size
    split = copy.copy(tape)
    split.sizes = sizes
    return split
