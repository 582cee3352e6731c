"""Rows to tokens with labels: one function for training, evaluation and preview, so that what is shown is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..recipe.parts import DataPart
from .chat_template import ChatFormat, Span, TemplateRefusedError, chat_format
from .row_format import ChatRow, PairRow, Row, RowFormat
from .rows import BadRow, RawRow, RowSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Label of tokens that are not learned, as torch's cross_entropy ignores it.
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sample as tokens.

    Attributes:
        input_ids: int32, (length,), cut at ``max_length``.
        labels: int32, (length,): the token where it is learned, else IGNORED. The first is always ignored: nothing
            stands before it that could predict it.
            A classifier has one label a row: its class, (1,); an encoder-decoder the answer's tokens.
        raw_length: Tokens before cutting.
        extra: What else a model takes for each token, by name: int32, (length,).
        images: The row's images, as paths (texts) or encoded bytes.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    raw_length: int
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)
    images: tuple[str | bytes, ...] = ()

    @property
    def num_supervised(self) -> int:
        """Tokens that are learned."""
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of one row before tokenizing.

    Attributes:
        text: What is tokenized.
        spans: Characters that are learned.
        ends_with_eos: Whether EOS is appended after the text (and learned).
    """

    text: str
    spans: tuple[Span, ...]
    ends_with_eos: bool


class Encoder:
    """Turns raw rows into tokens for one tokenizer and one choice of what is learned. Can be pickled for workers."""

    def __init__(self, data: DataPart, tokenizer: PreTrainedTokenizerBase, row_format: RowFormat) -> None:
        self.tokenizer = tokenizer
        self.row_format = row_format
        self.chat: ChatFormat = chat_format(tokenizer)
        self._train_on_all = data.train_on == "all"
        self._max_length = data.max_length

    def encode(self, rows: Sequence[RawRow | BadRow]) -> list[Encoded | BadRow]:
        """Return one sample, or what is wrong, per row."""
        outcomes: list[Encoded | BadRow | None] = []
        rendered: list[Rendered] = []
        for raw in rows:
            result = raw if isinstance(raw, BadRow) else self.render(raw)
            outcomes.append(result if isinstance(result, BadRow) else None)
            if isinstance(result, Rendered):
                rendered.append(result)
        encoded = iter(self._tokenize(rendered))
        return [
            outcome if outcome is not None else self._checked(next(encoded), raw)
            for outcome, raw in zip(outcomes, rows, strict=True)
        ]

    def render(self, raw: RawRow) -> Rendered | BadRow:
        """Return the text of a row and what of it is learned."""
        row = self.row_format.read(raw)
        if isinstance(row, BadRow):
            return row
        try:
            return self._render(row)
        except TemplateRefusedError as error:
            return BadRow(raw.file, raw.line, self.row_format.messages_column, str(error))

    def _render(self, row: Row) -> Rendered:
        if isinstance(row, ChatRow):
            if self._train_on_all:
                chat = self.chat.render_text(row.messages)
                return Rendered(chat, ((0, len(chat)),), False)
            if not any(message["role"] == "assistant" for message in row.messages):
                raise TemplateRefusedError("it has no message of the assistant, so there is nothing to learn")
            rendered = self.chat.render(row.messages)
            return Rendered(rendered.text, rendered.spans[row.context_turns :], False)
        if isinstance(row, PairRow):
            text = row.prompt + row.completion
            start = 0 if self._train_on_all else len(row.prompt)
            return Rendered(text, ((start, len(text)),), True)
        return Rendered(row.text, ((0, len(row.text)),), True)

    def _tokenize(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        return [
            Encoded(ids[: self._max_length], labels[: self._max_length], int(ids.size))
            for ids, labels in self._whole(rendered)
        ]

    def _whole(self, rendered: Sequence[Rendered]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return tokens and labels of texts before they are cut."""
        if not rendered:
            return []
        adds_special = rendered[0].ends_with_eos  # A chat template writes its special tokens itself.
        tokenized = tokenize_with_offsets(self.tokenizer, [item.text for item in rendered], adds_special)
        samples = []
        for item, ids, offsets in zip(rendered, *tokenized, strict=True):
            supervised = supervised_tokens(offsets, item.spans)
            eos = self.tokenizer.eos_token_id
            if item.ends_with_eos and eos is not None:
                if ids.size == 0 or ids[-1] != eos:
                    ids, supervised = np.append(ids, np.int32(eos)), np.append(supervised, True)
                supervised[-1] = True
            if supervised.size:
                supervised[0] = False
            labels = np.where(supervised, ids, np.int32(IGNORED)).astype(np.int32)
            samples.append((ids, labels))
        return samples

    def _checked(self, sample: Encoded, raw: RawRow | BadRow) -> Encoded | BadRow:
        if sample.num_supervised:
            return sample
        if sample.raw_length > self._max_length:
            cut = f"cutting {sample.raw_length} tokens at data.max_length={self._max_length}"
            reason = f"nothing to learn is left after {cut}"
        else:
            reason = "it holds no token to learn"
        return BadRow(raw.file, raw.line, "", reason)


def tokenize_with_offsets(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], adds_special: bool
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return token ids (int32) and character offsets (int64, (n, 2)) of each text."""
    if not tokenizer.is_fast:
        return _tokenize_slowly(tokenizer, texts, adds_special)
    batch = tokenizer(
        list(texts),
        add_special_tokens=adds_special,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        truncation=False,
        verbose=False,
    )
    ids = [np.asarray(row, dtype=np.int32) for row in batch["input_ids"]]
    offsets = [np.asarray(row, dtype=np.int64).reshape(-1, 2) for row in batch["offset_mapping"]]
    return ids, offsets


def _tokenize_slowly(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], adds_special: bool
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Find offsets for tokenizers without them: the text that the first n tokens decode to ends where token n ends."""
    all_ids, all_offsets = [], []
    for text in texts:
        ids: list[int] = tokenizer(text, add_special_tokens=adds_special, verbose=False)["input_ids"]
        special: set[int] = set(tokenizer.all_special_ids)
        offsets, position = [], 0
        for token in ids:
            piece: Any = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            found = text.find(piece, position) if piece else -1
            near = 0 <= found - position <= 1  # a sentencepiece token decodes without its leading space
            if token in special and not near:
                offsets.append((position, position))
                continue
            end = found + len(piece) if near else min(position + len(piece), len(text))
            offsets.append((position, end))
            position = end
        all_ids.append(np.asarray(ids, dtype=np.int32))
        all_offsets.append(np.asarray(offsets, dtype=np.int64).reshape(-1, 2))
    return all_ids, all_offsets


def supervised_tokens(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Return which tokens share a character with a span: bool, (n,).

    A token that begins before a span and reaches into it is learned: without it the answer could not begin.
    """
    supervised = np.zeros(len(offsets), dtype=bool)
    starts, ends = offsets[:, 0], offsets[:, 1]
    for start, end in spans:
        supervised |= (ends > start) & (starts < end) & (ends > starts)
    return supervised


class RowEncoder(Protocol):
    """What turns the rows of a task into samples. Can be pickled for workers."""

    row_format: Any

    def encode(self, rows: Sequence[RawRow | BadRow]) -> list[Encoded | BadRow]:
        """Return one sample, or what is wrong, per row."""


def encode_indices(encoder: RowEncoder, source: RowSource, indices: Sequence[int]) -> list[Encoded | BadRow]:
    """Fetch and encode the rows at ``indices``."""
    return encoder.encode(source.fetch(indices))
