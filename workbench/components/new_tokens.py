"""Tokens that a run adds to the vocabulary: rows of the embeddings that start at the mean of the others.

With LoRA only these rows train, as PEFT's trainable tokens, and are saved with the adapter; where the output head is
tied to the embeddings both share them. Without an adapter all embeddings train anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import Problem, RecipeError

if TYPE_CHECKING:
    from .source import ModelSource

FIELD = "model.new_tokens"


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> list[int]:
    """Add tokens to a tokenizer (of a processor, to its tokenizer) and return their ids in order.

    Raises:
        RecipeError: One of them is a token already.
    """
    words = getattr(tokenizer, "tokenizer", tokenizer)
    known = words.get_vocab()
    there = [token for token in tokens if token in known]
    if there:
        rest = tuple(token for token in tokens if token not in known)
        raise RecipeError([Problem(FIELD, f"{', '.join(there)}: already a token of this model.", ((FIELD, rest),))])
    words.add_tokens(list(tokens))
    return [int(words.convert_tokens_to_ids(token)) for token in tokens]


def add_token_rows(source: ModelSource, model: Any) -> tuple[int, ...]:
    """Give a model rows for the source's new tokens and return their ids; a source without any changes nothing.

    The new rows are the mean of the others, so that a new token begins as likely as others and not as an outlier.

    Args:
        source: Where the model comes from; without a tokenizer the ids are taken to follow the vocabulary.
        model: The base model, on any device.

    Raises:
        RecipeError: One of them is a token already.
    """
    tokens = tuple(getattr(source, "new_tokens", ()))
    if not tokens:
        return ()
    embeddings = model.get_input_embeddings()
    num_rows = int(embeddings.weight.shape[0])
    if source.has_tokenizer and source.path is not None:
        ids = _ids_of(source)
    else:
        ids = tuple(range(num_rows, num_rows + len(tokens)))
    if max(ids) >= num_rows:
        # The new rows are written below; transformers would draw them from a normal distribution otherwise.
        model.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
    written: set[int] = set()
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            if module is None or module.weight.is_meta or id(module.weight) in written:
                continue
            written.add(id(module.weight))
            is_old = torch.ones(module.weight.shape[0], dtype=torch.bool, device=module.weight.device)
            is_old[list(ids)] = False
            module.weight[list(ids)] = module.weight[is_old].float().mean(0).to(module.weight.dtype)
            if getattr(module, "bias", None) is not None:
                module.bias[list(ids)] = module.bias[is_old].float().mean().to(module.bias.dtype)
    return ids


def trained_rows(model: Any, ids: Sequence[int]) -> dict[str, list[int]] | None:
    """Return PEFT's ``trainable_token_indices`` for new tokens, or None where there are none.

    PEFT ties the output head by itself where the config says that it is tied; else its rows train beside.
    """
    if not ids:
        return None
    wanted = [model.get_input_embeddings()]
    head = model.get_output_embeddings()
    if head is not None and head.weight is not wanted[0].weight:
        wanted.append(head)
    return {_name_of(model, module): list(ids) for module in wanted}


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _ids_of(source: ModelSource) -> tuple[int, ...]:
    return _cached_ids(str(source.path), source.trust_remote_code, source.task, source.new_tokens)


@functools.lru_cache(maxsize=32)
def _cached_ids(path: str, trust_remote_code: bool, task: str, tokens: tuple[str, ...]) -> tuple[int, ...]:
    """Reading a tokenizer takes a second; estimates of one model ask again and again."""
    from types import SimpleNamespace

    from .tokenizer import load_tokenizer

    plain: Any = SimpleNamespace(
        name=path, path=path, has_tokenizer=True, trust_remote_code=trust_remote_code, task=task, new_tokens=()
    )
    return tuple(add_tokens(load_tokenizer(plain), tokens))
