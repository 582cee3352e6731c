"""A few rows as the model will see them: every token, and whether it is learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DataError
from ..recipe import Recipe
from .encoding import Encoder, Rendered, tokenize_with_offsets
from .row_format import detect_format
from .rows import BadRow, first_good, open_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreviewRow:
    """One row.

    Attributes:
        tokens: ``(text, is_supervised)`` of each token in order. Texts join to the text of the sample; a character made
            of several tokens is shown with the first of them. They are texts of a stranger: show them as text only.
        was_truncated: Whether the row is longer than ``max_length``.
        num_tokens: Tokens after cutting.
        num_raw_tokens: Tokens before cutting.
        num_supervised: Tokens that are learned.
        place: File and line it comes from.
    """

    tokens: list[tuple[str, bool]]
    was_truncated: bool
    num_tokens: int
    num_raw_tokens: int
    num_supervised: int
    place: str


def preview_rows(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, num_rows: int = 3) -> list[PreviewRow]:
    """Return the first usable rows of the data of ``recipe``, tokenized as training will tokenize them.

    Raises:
        DataError: The data cannot be found, or none of its first rows can be used.
    """
    source = open_rows(recipe)
    candidates = first_good(source, max(50, num_rows))
    if not candidates:
        broken = source.fetch([0])[0]
        raise DataError(f"{broken}. No row of {source.name} can be read; correct that line first.")
    encoder = Encoder(recipe.data, tokenizer, detect_format(recipe.data, candidates, source.name))
    previews: list[PreviewRow] = []
    first_problem: BadRow | None = None
    for raw in candidates:
        outcome = encoder.encode([raw])[0]
        if isinstance(outcome, BadRow):
            first_problem = first_problem or outcome
            continue
        rendered = encoder.render(raw)
        assert isinstance(rendered, Rendered)
        texts = _token_texts(tokenizer, rendered, outcome.input_ids)
        learned = outcome.labels != -100
        previews.append(
            PreviewRow(
                tokens=[(text, bool(flag)) for text, flag in zip(texts, learned, strict=True)],
                was_truncated=outcome.raw_length > outcome.input_ids.size,
                num_tokens=int(outcome.input_ids.size),
                num_raw_tokens=outcome.raw_length,
                num_supervised=outcome.num_supervised,
                place=f"{raw.file}, line {raw.line}",
            )
        )
        if len(previews) == num_rows:
            break
    if not previews:
        raise DataError(f"{first_problem}. None of the first {len(candidates)} rows can be used; correct them first.")
    return previews


def _token_texts(tokenizer: PreTrainedTokenizerBase, rendered: Rendered, ids: np.ndarray) -> list[str]:
    """Return the text of each token: its part of the rendered text, or its name where it stands for none (BOS, EOS)."""
    _, (offsets,) = tokenize_with_offsets(tokenizer, [rendered.text], rendered.ends_with_eos)
    texts: list[str] = []
    position = 0
    for index, token in enumerate(ids):
        start, end = (int(edge) for edge in offsets[index]) if index < len(offsets) else (0, 0)
        if end > start:
            texts.append(rendered.text[position : max(end, position)])
            position = max(end, position)
        else:
            texts.append(str(tokenizer.convert_ids_to_tokens(int(token))))
    return texts
