"""Rows with images to tokens: the text with the image tokens that the processor puts in, and what is learned of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..recipe.parts import DataPart
from .chat_template import IMAGE_MARK, TemplateRefusedError, chat_format
from .collator import TOKEN_COLUMNS
from .encoding import IGNORED, Encoded, Encoder, Rendered
from .images import ImageRef, image_refs, marked_messages, open_image
from .row_format import ChatRow, FieldError, PairRow, Row, RowFormat, TextRow
from .rows import BadRow, RawRow

# Tokens in front of an answer that are searched with it: enough to tell it from the same words in a question.
CONTEXT_TOKENS = 8


class ImageEncoder(Encoder):
    """Turns rows of text and images into tokens. Can be pickled for workers.

    Args:
        data: The settings.
        processor: From ``load_processor``.
        row_format: Where the text stands.
        image_column: Where the images stand; empty where the messages hold them.
        folder: What relative paths of images are relative to.
    """

    def __init__(self, data: DataPart, processor: Any, row_format: RowFormat, image_column: str, folder: Path) -> None:
        super().__init__(data, processor.tokenizer, row_format)
        self.processor = processor
        self.chat = chat_format(processor.tokenizer, getattr(processor, "chat_template", None))
        self._image_column, self._folder = image_column, folder
        self._token = str(processor.image_token)
        known = [processor.tokenizer.convert_tokens_to_ids(self._token), getattr(processor, "image_token_id", None)]
        known += list(getattr(processor, "image_token_ids", None) or [])
        self._image_ids = np.array([item for item in known if isinstance(item, int)], dtype=np.int32)

    def is_image(self, tokens: np.ndarray) -> np.ndarray:
        """Return which tokens stand for a piece of an image."""
        return np.isin(tokens, self._image_ids)

    def encode(self, rows: Sequence[RawRow | BadRow]) -> list[Encoded | BadRow]:
        """Return one sample, or what is wrong, per row."""
        return [raw if isinstance(raw, BadRow) else self._encode_row(raw) for raw in rows]

    def render(self, raw: RawRow) -> Rendered | BadRow:
        """Return the text of a row, one image token for each image."""
        found = self.read(raw)
        return found if isinstance(found, BadRow) else found[0]

    def read(self, raw: RawRow) -> tuple[Rendered, list[ImageRef]] | BadRow:
        """Return the text of a row, and its images in the order of the text."""
        column = self.row_format.messages_column
        try:
            values = dict(raw.values)
            refs = image_refs(values.get(self._image_column), self._image_column, self._folder)
            if column:
                values[column], inside = marked_messages(values.get(column), column, self._folder)
                refs = inside or refs
        except FieldError as error:
            return BadRow(raw.file, raw.line, error.field, error.reason)
        row = self.row_format.read(dataclasses.replace(raw, values=values))
        if isinstance(row, BadRow):
            return row
        row, num_marks = _with_marks(row, len(refs), self._token)
        if num_marks != len(refs):
            reason = f"it has {num_marks} places for images and {len(refs)} images"
            return BadRow(raw.file, raw.line, self._image_column or column, reason)
        try:
            rendered = self._render(row)
        except TemplateRefusedError as error:
            return BadRow(raw.file, raw.line, column, str(error))
        return _with_token(rendered, self._token), refs

    def _encode_row(self, raw: RawRow) -> Encoded | BadRow:
        found = self.read(raw)
        if isinstance(found, BadRow):
            return found
        rendered, refs = found
        ((ids, labels),) = self._whole([rendered])
        extra: dict[str, np.ndarray] = {}
        if refs:
            try:
                images = [open_image(ref) for ref in refs]
            except ValueError as error:
                return BadRow(raw.file, raw.line, self._image_column, str(error))
            expanded = self.processor(
                text=[rendered.text], images=[images], add_special_tokens=rendered.ends_with_eos, return_tensors="np"
            )
            wide = np.asarray(expanded["input_ids"][0], dtype=np.int32)
            if rendered.ends_with_eos and wide[-1] != ids[-1]:
                wide = np.append(wide, ids[-1])  # the EOS that the encoder adds to texts without a template
            spread = spread_labels(ids, labels, wide, np.isin(ids, self._image_ids))
            if spread is None:
                reason = "its answers cannot be found in the text that the processor makes"
                return BadRow(raw.file, raw.line, self.row_format.messages_column, reason)
            ids, labels = wide, spread
            for name in TOKEN_COLUMNS:
                if name in expanded:
                    extra[name] = np.zeros(ids.size, dtype=np.int32)
                    extra[name][: len(expanded[name][0])] = expanded[name][0]
        places = np.flatnonzero(np.isin(ids, self._image_ids))
        if places.size and places[-1] >= self._max_length:
            limit = f"data.max_length={self._max_length}"
            reason = f"its images end at token {places[-1] + 1}, beyond {limit}; an image cannot be cut"
            return BadRow(raw.file, raw.line, self._image_column, reason)
        cut = slice(self._max_length)
        extra = {name: column[cut] for name, column in extra.items()}
        return self._checked(Encoded(ids[cut], labels[cut], int(ids.size), extra, tuple(refs)), raw)


def spread_labels(narrow: np.ndarray, labels: np.ndarray, wide: np.ndarray, is_image: np.ndarray) -> np.ndarray | None:
    """Return the labels of a text whose images were expanded, or None where the answers cannot be found in it.

    Between two images the texts are the same but for a few tokens that some processors put around an image. What comes
    after the last image is matched from the end; each answer before it is searched with the tokens in front of it.

    Args:
        narrow: Tokens with one for each image, int32, (n,).
        labels: Their labels, (n,).
        wide: Tokens with all that the processor puts in, (m,).
        is_image: Which of ``narrow`` stand for an image, bool, (n,).
    """
    result = np.full(wide.size, IGNORED, dtype=np.int32)
    borders = [-1, *np.flatnonzero(is_image).tolist(), narrow.size]
    position = 0
    for begin, end in itertools.pairwise(borders):
        learned = begin + 1 + np.flatnonzero(labels[begin + 1 : end] != IGNORED)
        if not learned.size:
            continue
        first, stop = int(learned[0]), int(learned[-1]) + 1
        if end == narrow.size:
            first, place = (first, wide.size - (narrow.size - first))
            stop = narrow.size
        else:
            lead = min(first - begin - 1, CONTEXT_TOKENS)
            place = _find(wide, narrow[first - lead : stop], position)
            place += lead if place >= 0 else 0
        count = stop - first
        if place < position or not np.array_equal(wide[place : place + count], narrow[first:stop]):
            return None
        result[place : place + count] = labels[first:stop]
        position = place + count
    return result


def _find(tokens: np.ndarray, piece: np.ndarray, start: int) -> int:
    """Return where ``piece`` stands in ``tokens`` at or after ``start``, or -1."""
    candidates = np.flatnonzero(tokens[start : tokens.size - piece.size + 1] == piece[0]) + start
    return next((int(at) for at in candidates if np.array_equal(tokens[at : at + piece.size], piece)), -1)


def _with_marks(row: Row, num_images: int, token: str) -> tuple[Row, int]:
    """Return the row with a mark in the place of each image, and how many places there are.

    The processor's token (and ``<image>``, as many data sets write it) counts as a place. Where a row has images and no
    place for them, they stand in front of the first message of the user, or of the text.
    """

    def marked(text: str) -> str:
        return text.replace(token, IMAGE_MARK).replace("<image>", IMAGE_MARK)

    front = IMAGE_MARK * num_images
    if isinstance(row, ChatRow):
        messages = [{**message, "content": marked(message["content"])} for message in row.messages]
        if not any(IMAGE_MARK in message["content"] for message in messages):
            first = next((index for index, each in enumerate(messages) if each["role"] == "user"), 0)
            messages[first]["content"] = front + messages[first]["content"]
        count = sum(message["content"].count(IMAGE_MARK) for message in messages)
        return ChatRow(messages, row.context_turns), count
    if isinstance(row, PairRow):
        prompt, completion = marked(row.prompt), marked(row.completion)
        if IMAGE_MARK not in prompt + completion:
            prompt = front + prompt
        return PairRow(prompt, completion), (prompt + completion).count(IMAGE_MARK)
    text = marked(row.text)
    text = text if IMAGE_MARK in text else front + text
    return TextRow(text), text.count(IMAGE_MARK)


def _with_token(rendered: Rendered, token: str) -> Rendered:
    """Return a text with the processor's token where marks are left: texts that went through no template."""
    if IMAGE_MARK not in rendered.text:
        return rendered

    def moved(place: int) -> int:
        return place + (len(token) - 1) * rendered.text.count(IMAGE_MARK, 0, place)

    spans = tuple((moved(start), moved(end)) for start, end in rendered.spans)
    return Rendered(rendered.text.replace(IMAGE_MARK, token), spans, rendered.ends_with_eos)
