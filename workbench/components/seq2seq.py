"""Rows of an encoder-decoder: the text that it reads, and the text that it writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .encoding import IGNORED, Encoded, Encoder
from .row_format import ChatRow, PairRow, Row
from .rows import BadRow, RawRow


class PairEncoder(Encoder):
    """Turns pairs of texts into tokens. Can be pickled for workers."""

    def encode(self, rows: Sequence[RawRow | BadRow]) -> list[Encoded | BadRow]:
        """Return one sample, or what is wrong, per row."""
        return [raw if isinstance(raw, BadRow) else self._encode(raw) for raw in rows]

    def texts(self, raw: RawRow) -> tuple[str, str] | BadRow:
        """Return what is read and what is written."""
        row = self.row_format.read(raw)
        return row if isinstance(row, BadRow) else _pair_of(row, raw)

    def _encode(self, raw: RawRow) -> Encoded | BadRow:
        texts = self.texts(raw)
        if isinstance(texts, BadRow):
            return texts
        whole = [self.tokenizer(text, verbose=False)["input_ids"] for text in texts]
        read, written = (
            self.tokenizer(text, truncation=True, max_length=self._max_length, verbose=False)["input_ids"]
            for text in texts
        )
        eos = self.tokenizer.eos_token_id
        if eos is not None and written and written[-1] != eos:
            written = [*written[: self._max_length - 1], eos]
        if not read or not [token for token in written if token != eos]:
            return BadRow(raw.file, raw.line, "", "it holds no token to learn")
        return Encoded(
            np.asarray(read, dtype=np.int32), np.asarray(written, dtype=np.int32), max(len(ids) for ids in whole)
        )

    def shown(self, sample: Encoded) -> list[tuple[str, bool]]:
        """Return the texts of the tokens: those that are read, then those that are written."""
        words = self.tokenizer
        return [(words.decode([token]), False) for token in sample.input_ids.tolist()] + [
            (words.decode([token]), True) for token in sample.labels.tolist() if token != IGNORED
        ]


def _pair_of(row: Row, raw: RawRow) -> tuple[str, str] | BadRow:
    if isinstance(row, PairRow):
        return row.prompt, row.completion
    if isinstance(row, ChatRow):
        # An encoder-decoder has no chat template: question and answer are the two texts.
        roles = [message["role"] for message in row.messages if message["role"] != "system"]
        if roles == ["user", "assistant"]:
            texts = [message["content"] for message in row.messages]
            return "\n\n".join(texts[:-1]), texts[-1]
        return BadRow(raw.file, raw.line, "", "it is a chat of several turns; an encoder-decoder takes one pair")
    return BadRow(raw.file, raw.line, "", "it is one text; an encoder-decoder takes a pair")
