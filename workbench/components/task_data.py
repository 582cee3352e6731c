"""The data of several tasks as one training set whose rows know their task."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from ..recipe import Recipe

if TYPE_CHECKING:
    from .data import PreparedData

# The column, and the input, that says which task each row is of.
TASK = "task"


def task_sets(recipe: Recipe) -> dict[str, str]:
    """Return the data set of each task by its name, in order; empty where there are none."""
    return dict(entry.split("=", 1) for entry in recipe.tasks.data)


def prepare_tasks(recipe: Recipe, tokenizer: Any, **options: Any) -> PreparedData:
    """Prepare each task's data as if it were alone and join them; the report is of all together.

    Args:
        recipe: ``tasks.data`` is not empty.
        tokenizer: From ``load_tokenizer``.
        **options: Of ``prepare_data``.

    Raises:
        DataError: A data set cannot be read.
    """
    from datasets import concatenate_datasets

    from .data import prepare_data

    sets = task_sets(recipe)
    parts = [
        prepare_data(recipe.with_changes({"data.name_or_path": path, "tasks.data": ()}), tokenizer, **options)
        for path in sets.values()
    ]
    first = parts[0]
    train = concatenate_datasets([add_task_column(part.train, index) for index, part in enumerate(parts)])
    held_out = [add_task_column(part.evaluation, index) for index, part in enumerate(parts) if part.evaluation]
    reports = [part.report for part in parts]
    num_tokens = sum(part.num_tokens for part in parts)
    num_supervised = sum(part.num_supervised_tokens for part in parts)
    counts = ", ".join(f"{name} {len(part.train)}" for name, part in zip(sets, parts, strict=True))
    report = dataclasses.replace(
        first.report,
        name=", ".join(sets),
        num_rows=sum(one.num_rows for one in reports),
        num_train_rows=sum(one.num_train_rows for one in reports),
        num_evaluation_rows=sum(one.num_evaluation_rows for one in reports),
        num_bad_rows=sum(one.num_bad_rows for one in reports),
        bad_rows=tuple(row for one in reports for row in one.bad_rows),
        truncated_fraction=float(np.average([one.truncated_fraction for one in reports], weights=_rows(reports))),
        supervised_fraction=num_supervised / num_tokens,
        notes=(f"Samples of each task: {counts}.", *(note for one in reports for note in one.notes)),
    )
    return dataclasses.replace(
        first,
        train=train,
        evaluation=concatenate_datasets(held_out) if held_out else None,
        lengths=np.concatenate([part.lengths for part in parts]),
        raw_lengths=np.concatenate([part.raw_lengths for part in parts]),
        num_supervised_tokens=num_supervised,
        num_tokens=num_tokens,
        report=report,
    )


def _rows(reports: list[Any]) -> list[int]:
    return [one.num_train_rows for one in reports]


def add_task_column(samples: Any, index: int) -> Any:
    """Return a data set with its task's number as a column."""
    return samples.add_column(TASK, np.full(len(samples), index, dtype=np.int32))
