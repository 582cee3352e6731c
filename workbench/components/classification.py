"""Rows of a classifier: a text, or a pair of texts, and the class it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from ..events import Cancel
from ..recipe.parts import DataPart
from .encoding import Encoded
from .row_format import TEXT_COLUMNS, FieldError, listed_columns, text_of
from .rows import BadRow, RawRow, RowSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LABEL_COLUMNS = ("label", "labels", "class", "category", "target", "sentiment", "intent")
PAIR_COLUMNS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("text_a", "text_b"),
)
CLASS_TEXT_COLUMNS = (*TEXT_COLUMNS, "sentence", "review", "comment", "question", "utterance", "tweet", "title", "body")
# More different values than this are no classes: the column holds texts, prices or ids.
MAX_CLASSES = 2000
ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class ClassFormat:
    """How rows are read.

    Attributes:
        text_column: Column of the text.
        label_column: Column of the class.
        pair_column: Column of a second text, or empty.
    """

    text_column: str
    label_column: str
    pair_column: str = ""
    kind: str = "classification"

    def describe(self) -> str:
        """Return one phrase for a person."""
        texts = f"{self.text_column} and {self.pair_column}" if self.pair_column else self.text_column
        return f"{texts}, classified by {self.label_column}"

    def read(self, raw: RawRow) -> tuple[str, str | None, str] | BadRow:
        """Return text, second text and class of a row, or what is wrong with it."""
        try:
            text = text_of(raw.values, self.text_column, needed=True)
            pair = text_of(raw.values, self.pair_column, needed=True) if self.pair_column else None
            return text, pair, _class_name(raw.values, self.label_column)
        except FieldError as error:
            return BadRow(raw.file, raw.line, error.field, error.reason)


def _class_name(values: Mapping[str, Any], column: str) -> str:
    """Return a class as text: whole numbers without a fraction, names as they stand.

    Raises:
        FieldError: It is missing, or no class.
    """
    value = values.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise FieldError(column, "it is missing")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, float):
        raise FieldError(column, f"it is {value:g}; a class is a whole number or a name")
    if not isinstance(value, str | int):
        raise FieldError(column, f"it is a {type(value).__name__}; a class is a whole number or a name")
    return str(int(value)) if isinstance(value, bool) else str(value).strip()


def detect_classes(data: DataPart, rows: Sequence[RawRow], name: str) -> ClassFormat:
    """Return how the rows of a classifier are read: what the Recipe says, else by the names of the columns.

    Raises:
        DataError: A column that the Recipe names is not there, or none is known by name.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row.values))
    for field in ("text_column", "label_column"):
        chosen = getattr(data, field)
        if chosen and chosen not in columns:
            raise DataError(
                f"{name} has no column {chosen!r} (data.{field}). Its columns are {listed_columns(columns)}."
            )
    label = data.label_column or next((column for column in LABEL_COLUMNS if column in columns), None)
    if label is None:
        raise DataError(
            f"{name} has no column with classes that is known by name; its columns are {listed_columns(columns)}. "
            "Set data.label_column."
        )
    if data.text_column:
        return ClassFormat(data.text_column, label)
    for first, second in PAIR_COLUMNS:
        if first in columns and second in columns:
            return ClassFormat(first, label, second)
    texts = [column for column in CLASS_TEXT_COLUMNS if column in columns and column != label]
    others = [
        column for column in columns if column != label and any(isinstance(row.values.get(column), str) for row in rows)
    ]
    if texts or len(others) == 1:
        return ClassFormat((texts or others)[0], label)
    raise DataError(
        f"{name} has no column with text that is known by name; its columns are {listed_columns(columns)}. "
        "Set data.text_column."
    )


def find_classes(
    source: RowSource, row_format: ClassFormat, known: Sequence[str] = (), cancel: Cancel | None = None
) -> tuple[str, ...]:
    """Return the names of the classes in the order of their ids.

    Args:
        source: All rows, training and held out; a class that only few rows have must not depend on the split.
        row_format: Where the class stands.
        known: Classes of a model that was fine-tuned before; they keep their ids where they cover the data.
        cancel: Looked at between batches.

    Raises:
        DataError: There are fewer than two classes, or so many that they are none.
        Cancelled: The user cancelled.
    """
    seen: set[str] = set()
    for start in range(0, len(source), ROWS_AT_ONCE):
        if cancel is not None:
            cancel.check()
        for raw in source.fetch(range(start, min(start + ROWS_AT_ONCE, len(source)))):
            row = row_format.read(raw) if isinstance(raw, RawRow) else raw
            if not isinstance(row, BadRow):
                seen.add(row[2])
        if len(seen) > MAX_CLASSES:
            raise DataError(
                f"Column {row_format.label_column!r} of {source.name} holds more than {MAX_CLASSES} different values, "
                "so they are no classes. Set data.label_column."
            )
    if seen <= set(known) and seen:
        return tuple(known)
    given = source.class_names(row_format.label_column) if hasattr(source, "class_names") else ()
    if all(name.isdecimal() for name in seen) and seen:
        count = max(int(name) for name in seen) + 1
        if count > MAX_CLASSES:
            raise DataError(
                f"Column {row_format.label_column!r} of {source.name} holds the class {count - 1}; ids count from 0 "
                f"and end below {MAX_CLASSES}. Set data.label_column."
            )
        names = next((names for names in (known, given) if len(names) >= count), ())
        return tuple(names) or tuple(str(index) for index in range(max(count, 2)))
    if len(seen) < 2:
        raise DataError(
            f"Column {row_format.label_column!r} of {source.name} holds one class ({next(iter(seen), 'none')!r}); "
            "a classifier needs two. Add rows of another class."
        )
    return tuple(sorted(seen))


class ClassEncoder:
    """Turns rows of a classifier into tokens and a class. Can be pickled for workers."""

    def __init__(
        self, data: DataPart, tokenizer: PreTrainedTokenizerBase, row_format: ClassFormat, classes: Sequence[str]
    ) -> None:
        self.tokenizer = tokenizer
        self.row_format = row_format
        self.classes = tuple(classes)
        self._max_length = data.max_length
        self._ids = {name: index for index, name in enumerate(classes)}
        if all(name.isdecimal() for name in self._ids):
            return
        # Numbers in the data stand for the classes in their order, whatever these are called.
        self._ids |= {str(index): index for index in range(len(classes)) if str(index) not in self._ids}

    def encode(self, rows: Sequence[RawRow | BadRow]) -> list[Encoded | BadRow]:
        """Return one sample, or what is wrong, per row."""
        return [raw if isinstance(raw, BadRow) else self._encode(raw) for raw in rows]

    def _encode(self, raw: RawRow) -> Encoded | BadRow:
        row = self.row_format.read(raw)
        if isinstance(row, BadRow):
            return row
        text, pair, name = row
        if name not in self._ids:
            known = ", ".join(self.classes[:8]) + (" and more" if len(self.classes) > 8 else "")
            return BadRow(
                raw.file, raw.line, self.row_format.label_column, f"{name[:60]!r} is none of the classes: {known}"
            )
        whole = self.tokenizer(text, pair, truncation=False, verbose=False)
        raw_length = len(whole["input_ids"])
        if raw_length > self._max_length:
            # Cut by the tokenizer, which keeps the tokens that begin and end a text.
            whole = self.tokenizer(text, pair, truncation=True, max_length=self._max_length, verbose=False)
        if not whole["input_ids"]:
            return BadRow(raw.file, raw.line, self.row_format.text_column, "it holds no token")
        extra = {}
        if pair is not None and "token_type_ids" in whole:
            extra["token_type_ids"] = np.asarray(whole["token_type_ids"], dtype=np.int32)
        return Encoded(
            np.asarray(whole["input_ids"], dtype=np.int32),
            np.asarray([self._ids[name]], dtype=np.int32),
            raw_length,
            extra,
        )

    def class_of(self, sample: Encoded) -> str:
        """Return the name of a sample's class."""
        return self.classes[int(sample.labels[0])]
