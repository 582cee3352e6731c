"""Rows to a training set: read, split, tokenized, packed, and reported on."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DataError
from ..events import Cancel, Progress, ProgressCallback
from ..recipe import Recipe
from . import padding
from .collator import Collator, build_collator
from .encoders import RowEncoder, classes_of, data_folder, encoder_for
from .encoding import Encoded, Encoder, encode_indices
from .packing import join_samples, pack_lengths
from .padding import Histogram, PaddingShares
from .preview import PreviewRow, preview_rows
from .rows import BadRow, RowSource, open_evaluation_rows, open_rows
from .task_data import prepare_tasks

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Collator",
    "DataReport",
    "PreparedData",
    "PreviewRow",
    "build_collator",
    "prepare_data",
    "preview_rows",
]

# Rows handed to the tokenizer at once: enough for its own threads, few enough that Cancel answers at once.
BATCH_ROWS = 128
# Bad rows that are listed; all are counted.
LISTED_BAD_ROWS = 20
# Of a data set without an evaluation split, at most this fraction is held out.
HELD_OUT_FRACTION = 0.1
# Held-out rows are the same for every training seed, so that runs with several seeds are graded on the same rows.
SPLIT_SEED = 0


@dataclass(frozen=True)
class DataReport:
    """What was made of the rows. Plain data.

    Attributes:
        name: The data set.
        format: How rows were read, in words.
        num_rows: Rows of the data set (of the training split).
        num_train_rows: Rows that train.
        num_evaluation_rows: Rows held out or of the evaluation split.
        num_bad_rows: Rows that were looked at and cannot be used.
        bad_rows: The first of them, by line.
        truncated_fraction: Of the training rows, those longer than ``max_length``.
        supervised_fraction: Of the training tokens, those that are learned.
        padding: Share of padding under each choice.
        histogram: Token lengths before cutting.
        template: Where the answers were found: the name of a training template, ``"own"``, or ``"placeholders"``; empty
            where there is no chat.
        notes: Sentences worth showing.
        classes: Training rows of each class, by name; empty where there are none.
    """

    name: str
    format: str
    num_rows: int
    num_train_rows: int
    num_evaluation_rows: int
    num_bad_rows: int
    bad_rows: tuple[BadRow, ...]
    truncated_fraction: float
    supervised_fraction: float
    padding: PaddingShares
    histogram: Histogram
    template: str
    notes: tuple[str, ...] = ()
    classes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedData:
    """A training set of tokens.

    Attributes:
        train: Columns ``input_ids``, ``labels``, ``length``, and ``position_ids`` when packed; int32. Rows with images
            have the column ``images``.
        evaluation: The same without packing, or None.
        lengths: int32, tokens of each training sample after cutting (of each sequence when packed).
        raw_lengths: int32, tokens of each training row before cutting and packing.
        num_supervised_tokens: Tokens of the training set that are learned.
        num_tokens: Tokens of the training set.
        report: What was made of the rows.
        classes: Names of a classifier's classes in the order of their ids; empty for other tasks.
    """

    train: datasets.Dataset
    evaluation: datasets.Dataset | None
    lengths: np.ndarray
    raw_lengths: np.ndarray
    num_supervised_tokens: int
    num_tokens: int
    report: DataReport
    classes: tuple[str, ...] = ()


def prepare_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    *,
    known_classes: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> PreparedData:
    """Read, split, tokenize and (where asked) pack the data of ``recipe``.

    Args:
        recipe: The settings.
        tokenizer: From ``load_tokenizer``; for images it is a processor.
        known_classes: Classes of a classifier that was trained before, from ``task.own_labels``.
        progress: Told about the stage ``"tokenize"``.
        cancel: Ends the work.

    Raises:
        DataError: The data cannot be found, or no row of it can be used; the message names line and reason.
        Cancelled: The user cancelled.
    """
    if recipe.tasks.data:
        return prepare_tasks(recipe, tokenizer, progress=progress, cancel=cancel)
    source = open_rows(recipe, progress=progress, cancel=cancel)
    encoder = encoder_for(recipe, tokenizer, source, known_classes, data_folder(recipe.data.name_or_path), cancel)
    run = _Tokenizing(recipe, progress, cancel)
    held_out, evaluation_source = _choose_held_out(recipe, source, progress, cancel)
    if evaluation_source is not None:
        folder = data_folder(recipe.evaluation.split)
        evaluation_encoder = encoder_for(recipe, tokenizer, evaluation_source, classes_of(encoder), folder, cancel)
        order = np.random.default_rng(SPLIT_SEED).permutation(len(evaluation_source))
        evaluation, _ = run.take(evaluation_encoder, evaluation_source, order, recipe.evaluation.max_rows)
        rest = np.arange(len(source))
    else:
        split_order = np.random.default_rng(SPLIT_SEED).permutation(len(source))
        evaluation, looked_at = run.take(encoder, source, split_order, held_out)
        rest = np.sort(split_order[looked_at:])
    order = np.random.default_rng(recipe.training.seed).permutation(rest)
    samples, _ = run.take(encoder, source, order, recipe.data.max_rows)
    if not samples:
        raise _nothing_usable(source, run)
    return _assemble(recipe, source, encoder, samples, evaluation, run)


def _choose_held_out(
    recipe: Recipe, source: RowSource, progress: ProgressCallback | None, cancel: Cancel | None
) -> tuple[int, RowSource | None]:
    """Return how many rows are held out of the training rows, and the rows of a named evaluation split."""
    split = recipe.evaluation.split
    if split == "none":
        return 0, None
    if split == "auto":
        return min(recipe.evaluation.max_rows, int(len(source) * HELD_OUT_FRACTION)), None
    return 0, open_evaluation_rows(recipe, split, progress=progress, cancel=cancel)


@dataclass
class _Tokenizing:
    """The loop over batches of rows: progress, cancel, worker processes, and the rows that cannot be used."""

    recipe: Recipe
    progress: ProgressCallback | None
    cancel: Cancel | None
    bad_rows: list[BadRow] = field(default_factory=list)
    num_done: int = 0

    def take(
        self, encoder: RowEncoder, source: RowSource, order: np.ndarray, wanted: int | None
    ) -> tuple[list[Encoded], int]:
        """Return up to ``wanted`` usable rows in ``order`` (all when None), and how many were looked at."""
        total = len(order) if wanted is None else min(wanted, len(order))
        taken: list[Encoded] = []
        if not total:
            return taken, 0
        looked_at = 0
        num_proc = self.recipe.data.num_proc if total > 2 * BATCH_ROWS else 1
        batch_rows = BATCH_ROWS if wanted is None else min(BATCH_ROWS, max(8, wanted))
        with _encoded_batches(encoder, source, order, batch_rows, num_proc) as batches:
            for outcomes in batches:
                if self.cancel is not None:
                    self.cancel.check()
                for outcome in outcomes:
                    if wanted is not None and len(taken) >= wanted:
                        return taken, looked_at
                    looked_at += 1
                    if isinstance(outcome, BadRow):
                        self.bad_rows.append(outcome)
                    else:
                        taken.append(outcome)
                if self.progress is not None:
                    done = min(len(taken) if wanted is not None else looked_at, total)
                    self.progress(Progress("tokenize", done, total, f"Tokenizing {source.name}"))
        return taken, looked_at


@contextlib.contextmanager
def _encoded_batches(
    encoder: RowEncoder, source: RowSource, order: np.ndarray, batch_rows: int, num_proc: int
) -> Iterator[Iterator[list[Encoded | BadRow]]]:
    """Yield an iterator over the encoded batches of ``order``, in order, made here or by worker processes."""
    batches = [order[start : start + batch_rows].tolist() for start in range(0, len(order), batch_rows)]
    if num_proc == 1:
        yield (encode_indices(encoder, source, batch) for batch in batches)
        return
    # Workers are started afresh: a copy of a process that holds threads and a GPU may hang.
    context = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
    pool = ProcessPoolExecutor(num_proc, mp_context=context, initializer=_set_worker, initargs=(encoder, source))
    try:
        yield _in_order(lambda batch: pool.submit(_encode_in_worker, batch), batches, 2 * num_proc)
    except BrokenProcessPool as error:
        raise DataError(
            f"The {num_proc} tokenizing processes ended early (out of memory, or a script without "
            "`if __name__ == '__main__':`). Set data.num_proc=1."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    submit: Callable[[list[int]], Future[list[Encoded | BadRow]]], batches: Sequence[list[int]], ahead: int
) -> Iterator[list[Encoded | BadRow]]:
    """Yield results in order with at most ``ahead`` batches under way, so that stopping early wastes little."""
    pending: list[Future[list[Encoded | BadRow]]] = []
    for batch in batches:
        pending.append(submit(batch))
        if len(pending) >= ahead:
            yield pending.pop(0).result()
    for future in pending:
        yield future.result()


_worker: dict[str, tuple[RowEncoder, RowSource]] = {}


def _set_worker(encoder: RowEncoder, source: RowSource) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # The processes are the parallelism.
    _worker["job"] = (encoder, source)


def _encode_in_worker(indices: list[int]) -> list[Encoded | BadRow]:
    encoder, source = _worker["job"]
    return encode_indices(encoder, source, indices)


def _nothing_usable(source: RowSource, run: _Tokenizing) -> DataError:
    if not run.bad_rows:
        return DataError(
            f"{source.name} has too few rows to hold some out and train. Add rows or set evaluation.split=none."
        )
    first = min(run.bad_rows, key=lambda row: (row.file, row.line))
    more = f" The other {len(run.bad_rows) - 1} rows cannot be used either." if len(run.bad_rows) > 1 else ""
    if "max_length" in first.reason:
        hint = "Raise data.max_length."
    elif "no message of the assistant" in first.reason or "no token to learn" in first.reason:
        hint = "Add answers of the assistant, or set data.train_on=all."
    else:
        hint = "Correct the rows, or choose their columns (data.messages_column, data.text_column and so on)."
    return DataError(f"{first}.{more} {hint}")


def _assemble(
    recipe: Recipe,
    source: RowSource,
    encoder: RowEncoder,
    samples: Sequence[Encoded],
    evaluation: Sequence[Encoded],
    run: _Tokenizing,
) -> PreparedData:
    raw_lengths = np.array([sample.raw_length for sample in samples], dtype=np.int32)
    cut_lengths = np.array([sample.input_ids.size for sample in samples], dtype=np.int32)
    max_length = recipe.data.max_length
    if recipe.data.packing:
        pairs = [(sample.input_ids, sample.labels) for sample in samples]
        joined = [join_samples([pairs[i] for i in group]) for group in pack_lengths(cut_lengths, max_length)]
        columns = {
            "input_ids": [row[0] for row in joined],
            "labels": [row[1] for row in joined],
            "position_ids": [row[2] for row in joined],
        }
    else:
        columns = _columns(samples)
    num_tokens = int(cut_lengths.sum())
    num_supervised = sum(sample.num_supervised for sample in samples)
    bad_rows = sorted(run.bad_rows, key=lambda row: (row.file, row.line))
    report = DataReport(
        name=source.name,
        format=encoder.row_format.describe(),
        num_rows=len(source),
        num_train_rows=len(samples),
        num_evaluation_rows=len(evaluation),
        num_bad_rows=len(bad_rows),
        bad_rows=tuple(bad_rows[:LISTED_BAD_ROWS]),
        truncated_fraction=float((raw_lengths > max_length).mean()),
        supervised_fraction=num_supervised / num_tokens,
        padding=padding.padding_shares(
            cut_lengths,
            max_length=max_length,
            batch_size=recipe.training.per_device_train_batch_size,
            seed=recipe.training.seed,
        ),
        histogram=padding.length_histogram(raw_lengths),
        template=_template(encoder),
        notes=_notes(recipe, encoder, raw_lengths, bad_rows, len(evaluation)),
        classes=_count_classes(encoder, samples),
    )
    return PreparedData(
        train=build_dataset(columns, _images(samples)),
        evaluation=build_dataset(_columns(evaluation), _images(evaluation)) if evaluation else None,
        lengths=np.array([row.size for row in columns["input_ids"]], dtype=np.int32),
        raw_lengths=raw_lengths,
        num_supervised_tokens=num_supervised,
        num_tokens=num_tokens,
        report=report,
        classes=classes_of(encoder),
    )


def _columns(samples: Sequence[Encoded]) -> dict[str, list[np.ndarray]]:
    """Return samples by column; what only some rows have for each token is 0 in the others."""
    columns = {"input_ids": [each.input_ids for each in samples], "labels": [each.labels for each in samples]}
    for name in sorted({name for sample in samples for name in sample.extra}):
        columns[name] = [each.extra.get(name, np.zeros_like(each.input_ids)) for each in samples]
    return columns


def _images(samples: Sequence[Encoded]) -> list[tuple[str | bytes, ...]] | None:
    return [sample.images for sample in samples] if any(sample.images for sample in samples) else None


def _template(encoder: RowEncoder) -> str:
    chat = getattr(encoder, "chat", None)
    return "" if chat is None else chat.training_template or "placeholders"


def _count_classes(encoder: RowEncoder, samples: Sequence[Encoded]) -> dict[str, int]:
    classes = classes_of(encoder)
    if not classes:
        return {}
    counts = np.bincount([int(sample.labels[0]) for sample in samples], minlength=len(classes))
    return {name: int(count) for name, count in zip(classes, counts, strict=True)}


def _notes(
    recipe: Recipe, encoder: RowEncoder, raw_lengths: np.ndarray, bad_rows: Sequence[BadRow], num_evaluation: int
) -> tuple[str, ...]:
    notes = []
    if bad_rows:
        notes.append(f"{len(bad_rows)} rows cannot be used and are left out. The first: {bad_rows[0]}.")
    ends = (
        "an answer that is cut does not teach the model to stop" if not classes_of(encoder) else "the end is not read"
    )
    truncated = int((raw_lengths > recipe.data.max_length).sum())
    if truncated:
        notes.append(
            f"{truncated} of {len(raw_lengths)} rows are longer than {recipe.data.max_length} tokens and are cut at "
            f"the end (the longest has {int(raw_lengths.max())}); {ends}."
        )
    if (
        encoder.row_format.kind == "prompt_completion"
        and isinstance(encoder, Encoder)
        and encoder.chat.training_template
    ):
        notes.append(
            "Prompt and completion are joined as they stand. Set data.format=chat to use the model's chat template."
        )
    if recipe.evaluation.split == "auto" and not num_evaluation:
        notes.append("There are too few rows to hold some out, so nothing is evaluated.")
    return tuple(notes)


def build_dataset(
    columns: dict[str, list[np.ndarray]], images: Sequence[tuple[str | bytes, ...]] | None = None
) -> datasets.Dataset:
    """Return an in-memory Dataset of int32 lists, with a column ``length`` (of the first column's lists).

    Args:
        columns: Lists of integers by column.
        images: Paths or encoded bytes of each row's images; they are decoded when a batch is made.
    """
    import datasets
    import pyarrow as pa

    arrays: dict[str, pa.Array] = {}
    for name, rows in columns.items():
        offsets = np.concatenate([[0], np.cumsum([row.size for row in rows])])
        values = pa.array(np.concatenate(rows), type=pa.int32())
        arrays[name] = pa.LargeListArray.from_arrays(pa.array(offsets, type=pa.int64()), values)
    lengths = np.array([row.size for row in next(iter(columns.values()))], dtype=np.int32)
    arrays["length"] = pa.array(lengths)
    if images is not None:
        kind = pa.struct([("path", pa.string()), ("bytes", pa.large_binary())])
        described = [[{"path": one} if isinstance(one, str) else {"bytes": one} for one in each] for each in images]
        arrays["images"] = pa.array(described, type=pa.large_list(kind))
    dataset = datasets.Dataset(datasets.table.InMemoryTable(pa.table(arrays)))
    # Not "numpy" for images: it cuts zero bytes off the end of what it takes for text.
    return dataset.with_format("numpy", columns=[*columns, "length"], output_all_columns=images is not None)
