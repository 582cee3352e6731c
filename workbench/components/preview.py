"""A few rows as the model will see them: every token, and whether it is learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from ..recipe import Recipe
from .classification import ClassEncoder
from .encoders import RowEncoder, data_folder, encoder_for
from .encoding import IGNORED, Encoded, Encoder, Rendered, tokenize_with_offsets
from .image_encoding import ImageEncoder
from .rows import BadRow, RawRow, first_good, open_rows
from .seq2seq import PairEncoder

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
        label: Name of the row's class; empty where there is none.
        num_images: Images of the row.
    """

    tokens: list[tuple[str, bool]]
    was_truncated: bool
    num_tokens: int
    num_raw_tokens: int
    num_supervised: int
    place: str
    label: str = ""
    num_images: int = 0


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
    encoder = encoder_for(recipe, tokenizer, source, folder=data_folder(recipe.data.name_or_path))
    previews: list[PreviewRow] = []
    first_problem: BadRow | None = None
    for raw in candidates:
        outcome = encoder.encode([raw])[0]
        if isinstance(outcome, BadRow):
            first_problem = first_problem or outcome
            continue
        previews.append(
            PreviewRow(
                tokens=_shown_tokens(encoder, tokenizer, raw, outcome),
                was_truncated=outcome.raw_length > outcome.input_ids.size,
                num_tokens=int(outcome.input_ids.size),
                num_raw_tokens=outcome.raw_length,
                num_supervised=outcome.num_supervised,
                place=f"{raw.file}, line {raw.line}",
                label=encoder.class_of(outcome) if isinstance(encoder, ClassEncoder) else "",
                num_images=len(outcome.images),
            )
        )
        if len(previews) == num_rows:
            break
    if not previews:
        raise DataError(f"{first_problem}. None of the first {len(candidates)} rows can be used; correct them first.")
    return previews


def _shown_tokens(encoder: RowEncoder, tokenizer: Any, raw: RawRow, sample: Encoded) -> list[tuple[str, bool]]:
    """Return the texts of a sample's tokens, and whether each is learned.

    A run of image tokens is shown as one piece with their number: hundreds of equal tokens tell nothing.
    """
    if isinstance(encoder, PairEncoder):
        return encoder.shown(sample)
    if isinstance(encoder, ClassEncoder):
        return [(text, False) for text in _decoded(tokenizer, sample.input_ids)]
    if isinstance(encoder, ImageEncoder):
        return _with_images(encoder, sample)
    assert isinstance(encoder, Encoder)
    rendered = encoder.render(raw)
    assert isinstance(rendered, Rendered)
    texts = _token_texts(tokenizer, rendered, sample.input_ids)
    return [(text, bool(flag)) for text, flag in zip(texts, sample.labels != IGNORED, strict=True)]


def _decoded(tokenizer: Any, ids: np.ndarray) -> list[str]:
    return [str(tokenizer.decode([token], clean_up_tokenization_spaces=False)) for token in ids.tolist()]


def _with_images(encoder: ImageEncoder, sample: Encoded) -> list[tuple[str, bool]]:
    shown: list[tuple[str, bool]] = []
    texts = _decoded(encoder.tokenizer, sample.input_ids)
    is_image = encoder.is_image(sample.input_ids)
    position = 0
    while position < len(texts):
        end = position
        while end < len(texts) and is_image[end]:
            end += 1
        if end > position:
            shown.append((f"[image: {end - position} tokens]", False))
            position = end
            continue
        shown.append((texts[position], bool(sample.labels[position] != IGNORED)))
        position += 1
    return shown


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
