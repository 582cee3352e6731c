"""The encoder of each task: what turns its rows into samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..events import Cancel
from ..recipe import Recipe
from .classification import ClassEncoder, detect_classes, find_classes
from .encoding import Encoder, RowEncoder
from .image_encoding import ImageEncoder
from .images import find_image_column
from .row_format import RowFormat, detect_format
from .rows import BadRow, RawRow, RowSource, first_good
from .seq2seq import PairEncoder
from .task import CLASSIFICATION, IMAGE_TEXT, SEQ2SEQ

__all__ = ["RowEncoder", "classes_of", "data_folder", "encoder_for"]

# Rows whose columns decide how all rows are read.
LOOK_AT_ROWS = 50


def encoder_for(
    recipe: Recipe,
    tokenizer: Any,
    source: RowSource,
    known_classes: Sequence[str] = (),
    folder: Path | None = None,
    cancel: Cancel | None = None,
) -> RowEncoder:
    """Return the encoder for the rows of ``source``.

    Args:
        recipe: ``model.task`` decides the kind.
        tokenizer: The model's tokenizer, or its processor where it takes images.
        source: The rows.
        known_classes: Classes that keep their ids.
        folder: What relative paths of images are relative to.
        cancel: Looked at while classes are gathered.

    Raises:
        DataError: No row can be read, or the columns mean nothing.
        Cancelled: The user cancelled.
    """
    first = first_good(source, LOOK_AT_ROWS)
    if not first:
        broken = next(row for row in source.fetch([0]) if isinstance(row, BadRow))
        raise DataError(f"{broken}. No row of {source.name} can be read; correct that line first.")
    if recipe.model.task == CLASSIFICATION:
        row_format = detect_classes(recipe.data, first, source.name)
        classes = find_classes(source, row_format, known_classes, cancel)
        wanted = recipe.model.num_labels
        if wanted is not None and len(classes) > wanted:
            raise DataError(
                f"{source.name} has {len(classes)} classes in {row_format.label_column!r}, and model.num_labels is "
                f"{wanted}. Set model.num_labels={len(classes)}, or leave it empty."
            )
        return ClassEncoder(recipe.data, tokenizer, row_format, classes)
    if recipe.model.task == SEQ2SEQ:
        return PairEncoder(recipe.data, tokenizer, detect_format(recipe.data, first, source.name))
    if recipe.model.task == IMAGE_TEXT:
        column = find_image_column(recipe.data, first, source.name)
        return ImageEncoder(
            recipe.data, tokenizer, _text_format(recipe, first, column, source.name), column, folder or Path()
        )
    return Encoder(recipe.data, tokenizer, detect_format(recipe.data, first, source.name))


def _text_format(recipe: Recipe, rows: Sequence[RawRow], image_column: str, name: str) -> RowFormat:
    """Return where the text of rows with images stands; their image column is no text."""
    texts = [
        dataclasses.replace(row, values={key: value for key, value in row.values.items() if key != image_column})
        for row in rows
    ]
    return detect_format(recipe.data, texts, name)


def data_folder(path: str) -> Path:
    """Return the folder that relative paths of images in a data file are relative to."""
    file = Path(path.strip()).expanduser()
    return file.parent if file.is_file() else Path()


def classes_of(encoder: RowEncoder) -> tuple[str, ...]:
    """Return the names of the classes in the order of their ids; empty where the task has none."""
    return encoder.classes if isinstance(encoder, ClassEncoder) else ()
