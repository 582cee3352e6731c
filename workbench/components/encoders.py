"""The encoder of each task: what turns its rows into samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import DataError
from ..events import Cancel
from ..recipe import Recipe
from .classification import ClassEncoder, detect_classes, find_classes
from .encoding import Encoder, RowEncoder
from .row_format import detect_format
from .rows import BadRow, RowSource, first_good
from .task import CLASSIFICATION

__all__ = ["RowEncoder", "classes_of", "encoder_for"]

# Rows whose columns decide how all rows are read.
LOOK_AT_ROWS = 50


def encoder_for(
    recipe: Recipe,
    tokenizer: Any,
    source: RowSource,
    known_classes: Sequence[str] = (),
    cancel: Cancel | None = None,
) -> RowEncoder:
    """Return the encoder for the rows of ``source``.

    Args:
        recipe: ``model.task`` decides the kind.
        tokenizer: The model's tokenizer, or its processor where it takes images.
        source: The rows.
        known_classes: Classes that keep their ids.
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
    return Encoder(recipe.data, tokenizer, detect_format(recipe.data, first, source.name))


def classes_of(encoder: RowEncoder) -> tuple[str, ...]:
    """Return the names of the classes in the order of their ids; empty where the task has none."""
    return encoder.classes if isinstance(encoder, ClassEncoder) else ()
