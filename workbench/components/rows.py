"""Rows of a data set as they lie in a file or on the hub, each with the place it comes from.

Nothing here knows of tokens. A row that cannot be read becomes a BadRow with file, line and reason instead of an
exception, so that one broken line does not cost the other million.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import Cancelled, DataError
from ..events import Cancel, Progress, ProgressCallback
from ..recipe import Recipe
from . import hub, python_docs
from .cache import cache_dir

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")
# A CSV cell may hold a whole document; Python's default limit is 131,072 characters.
CSV_FIELD_CHARS = 10**9


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row: its values by column, and its place (``line`` from 1; the row's number where lines mean nothing)."""

    values: dict[str, Any]
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class BadRow:
    """One row that cannot be used.

    Attributes:
        file: File or data set.
        line: Line (or row number), from 1.
        field: Column that is wrong; empty when the whole row is.
        reason: What is wrong with it.
    """

    file: str
    line: int
    field: str
    reason: str

    def __str__(self) -> str:
        where = f", {self.field}" if self.field else ""
        return f"{self.file}, line {self.line}{where}: {self.reason}"


class RowSource(Protocol):
    """Rows that can be fetched in any order."""

    name: str

    def __len__(self) -> int:
        """Return the number of rows, broken ones included."""

    def fetch(self, indices: Sequence[int]) -> list[RawRow | BadRow]:
        """Return the rows at ``indices``, in that order."""


def open_rows(recipe: Recipe, *, progress: ProgressCallback | None = None, cancel: Cancel | None = None) -> RowSource:
    """Return the rows that ``recipe.data`` names.

    Raises:
        DataError: There is no such file or data set, it is empty or of an unknown kind, or the hub does not answer.
        Cancelled: The user cancelled.
    """
    data = recipe.data
    name = data.name_or_path.strip()
    if name.lower() == python_docs.NAME:
        return JsonLines(python_docs.prepare(progress=progress, cancel=cancel), name=python_docs.NAME, cancel=cancel)
    path = Path(name).expanduser()
    if path.exists():
        return open_file(path, cancel=cancel)
    if path.suffix.lower() in SUFFIXES or name.startswith((".", "~", "/")) or not hub.looks_like_hub_id(name):
        raise DataError(
            f"There is no file {name!r}. Give a file ({', '.join(SUFFIXES)}), a hub id or {python_docs.NAME}."
        )
    return open_hub(name, data.config_name, data.split, progress=progress, cancel=cancel)


def open_evaluation_rows(
    recipe: Recipe, split: str, *, progress: ProgressCallback | None = None, cancel: Cancel | None = None
) -> RowSource:
    """Return the rows of ``evaluation.split`` when it names a split of a hub data set, or a local file.

    Raises:
        DataError: The data is local and has no splits, or there is no such split.
        Cancelled: The user cancelled.
    """
    path = Path(split).expanduser()
    if path.is_file():
        return open_file(path, cancel=cancel)
    name = recipe.data.name_or_path.strip()
    if name.lower() == python_docs.NAME or Path(name).expanduser().exists():
        raise DataError(
            f"{name!r} has no split {split!r}. Set evaluation.split to auto, none or the path of another file."
        )
    return open_hub(name, recipe.data.config_name, split, progress=progress, cancel=cancel)


def open_file(path: Path, *, cancel: Cancel | None = None) -> RowSource:
    """Return the rows of one local file.

    Raises:
        DataError: It cannot be read, is empty, or is of an unknown kind.
    """
    suffix = path.suffix.lower()
    if path.is_dir():
        raise DataError(f"{path} is a folder. Give one file ({', '.join(SUFFIXES)}).")
    if suffix not in SUFFIXES:
        raise DataError(f"{path.name!r} is of no known kind. Give a file of {', '.join(SUFFIXES)}.")
    try:
        if path.stat().st_size == 0:
            raise _empty(path)
        if suffix in (".jsonl", ".ndjson"):
            source: RowSource = JsonLines(path, cancel=cancel)
        elif suffix == ".json":
            source = _open_json(path, cancel)
        elif suffix in (".csv", ".tsv"):
            source = ListedRows(path.name, list(_read_csv(path, "\t" if suffix == ".tsv" else ",", cancel)))
        elif suffix == ".parquet":
            source = ParquetRows(path)
        else:
            source = ListedRows(path.name, list(_read_text(path)))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}). Give a file that can be read.") from error
    if not len(source):
        raise _empty(path)
    return source


def _empty(path: Path) -> DataError:
    return DataError(
        f"{path} holds no rows. Write at least one, for example the line "
        '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} in a .jsonl file.'
    )


class ListedRows:
    """Rows that are in memory already."""

    def __init__(self, name: str, rows: list[RawRow | BadRow]) -> None:
        self.name = name
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, indices: Sequence[int]) -> list[RawRow | BadRow]:
        """Return the rows at ``indices``."""
        return [self._rows[index] for index in indices]


class JsonLines:
    """A file with one JSON object a line. Only the places of the lines are kept, so that its size does not matter."""

    def __init__(self, path: Path, *, name: str | None = None, cancel: Cancel | None = None) -> None:
        self.name = name or path.name
        self._path = path
        starts, lines = _index_lines(path, cancel)
        self._starts, self._lines = starts, lines

    def __len__(self) -> int:
        return len(self._starts)

    def fetch(self, indices: Sequence[int]) -> list[RawRow | BadRow]:
        """Read and parse the lines at ``indices``."""
        rows: list[RawRow | BadRow] = []
        with self._path.open("rb") as file:
            for index in indices:
                file.seek(int(self._starts[index]))
                rows.append(_parse_line(file.readline(), self.name, int(self._lines[index])))
        return rows


def _index_lines(path: Path, cancel: Cancel | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the byte offsets and numbers of the lines that are not blank."""
    starts: list[int] = []
    lines: list[int] = []
    position = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                starts.append(position)
                lines.append(number)
            position += len(line)
            if cancel is not None and number % 4096 == 0:
                cancel.check()
    return np.array(starts, dtype=np.int64), np.array(lines, dtype=np.int64)


def _parse_line(line: bytes, name: str, number: int) -> RawRow | BadRow:
    try:
        values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n"))
    except UnicodeDecodeError:
        return BadRow(name, number, "", "it is not UTF-8 text")
    except json.JSONDecodeError as error:
        return BadRow(name, number, "", f"it is not JSON ({error.msg}, column {error.colno})")
    except RecursionError:
        return BadRow(name, number, "", "its JSON is nested too deeply")
    if not isinstance(values, dict):
        return BadRow(name, number, "", f"it holds a {type(values).__name__}, not an object with named values")
    return RawRow(values, name, number)


def _open_json(path: Path, cancel: Cancel | None) -> RowSource:
    """Open a .json file: a list of objects, an object with one list of them, or one object a line."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if not text.strip():
        raise _empty(path)
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{") and "\n" in text.strip():
            return JsonLines(path, cancel=cancel)
        raise DataError(
            f"{path}, line {error.lineno}: it is not JSON ({error.msg}). "
            "Correct that line, or write one object a line (.jsonl)."
        ) from error
    if isinstance(values, dict):
        lists = [value for value in values.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        is_row = any(key in values for key in ("messages", "conversations"))
        values = lists[0] if len(lists) == 1 and not is_row else [values]
    if not isinstance(values, list):
        raise DataError(
            f"{path} holds a {type(values).__name__}. Write a list of objects, or one object a line (.jsonl)."
        )
    rows: list[RawRow | BadRow] = [
        RawRow(value, path.name, number)
        if isinstance(value, dict)
        else BadRow(path.name, number, "", f"it holds a {type(value).__name__}, not an object with named values")
        for number, value in enumerate(values, start=1)
    ]
    return ListedRows(path.name, rows)


def _read_csv(path: Path, delimiter: str, cancel: Cancel | None) -> Iterator[RawRow | BadRow]:
    previous_limit = csv.field_size_limit(CSV_FIELD_CHARS)
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter)
            header: list[str] = []
            line = 1
            for cells in _csv_records(reader):
                if cancel is not None and line % 4096 == 0:
                    cancel.check()
                if isinstance(cells, str):
                    yield BadRow(path.name, line, "", cells)
                elif not any(cell.strip() for cell in cells):
                    pass  # a blank line
                elif not header:
                    header = cells
                elif len(cells) != len(header):
                    yield BadRow(path.name, line, "", f"it has {len(cells)} cells where the header has {len(header)}")
                else:
                    yield RawRow(dict(zip(header, cells, strict=True)), path.name, line)
                line = reader.line_num + 1
    finally:
        csv.field_size_limit(previous_limit)


def _csv_records(reader: Any) -> Iterator[list[str] | str]:
    """Yield the cells of each record, or what is wrong with it."""
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"it is not CSV ({error})"


def _read_text(path: Path) -> Iterator[RawRow]:
    """Yield paragraphs (blank lines between them) as rows; in a file without blank lines, each line."""
    text = path.read_text(encoding="utf-8-sig", errors="replace").strip("\n")
    by_paragraph = any(not line.strip() for line in text.splitlines())
    block: list[str] = []
    first = 1
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if by_paragraph and line.strip():
            first = first if block else number
            block.append(line)
        elif by_paragraph and block:
            yield RawRow({"text": "\n".join(block)}, path.name, first)
            block = []
        elif line.strip():
            yield RawRow({"text": line}, path.name, number)


class ParquetRows:
    """A Parquet file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self.name = path.name
        try:
            self._table = pyarrow.parquet.read_table(path, memory_map=True)
        except pyarrow.ArrowException as error:
            reason = str(error).splitlines()[0][:160]
            raise DataError(f"{path} is not a Parquet file that can be read ({reason}). Write it again.") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def fetch(self, indices: Sequence[int]) -> list[RawRow | BadRow]:
        """Return the rows at ``indices``."""
        rows = self._table.take(list(indices)).to_pylist()
        return [RawRow(values, self.name, index + 1) for values, index in zip(rows, indices, strict=True)]


class HubRows:
    """A split of a data set from the hub."""

    def __init__(self, name: str, dataset: Any) -> None:
        self.name = name
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the names of the classes in ``column``, where the data set says them."""
        return tuple(getattr(self._dataset.features.get(column), "names", None) or ())

    def fetch(self, indices: Sequence[int]) -> list[RawRow | BadRow]:
        """Return the rows at ``indices``."""
        columns = self._dataset[list(indices)]
        return [
            RawRow({key: column[place] for key, column in columns.items()}, self.name, index + 1)
            for place, index in enumerate(indices)
        ]


def open_hub(
    name: str,
    config_name: str | None,
    split: str,
    *,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> RowSource:
    """Return the rows of a split on the hub, fetched into the user cache by ``datasets``.

    Raises:
        DataError: The hub does not answer or does not know the name, or the split or configuration does not exist.
        Cancelled: The user cancelled before the fetching began.
    """
    hub.require_repo(name, kind="dataset", cancel=cancel)
    import datasets

    if progress is not None:
        progress(Progress("download", 0, None, f"Fetching {name}"))
    shows_bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.utils.logging.disable_progress_bar()  # Its bars would land in a cell that has long ended.
    try:
        dataset = datasets.load_dataset(name, config_name, split=split, cache_dir=str(cache_dir() / "datasets"))
    except Cancelled:
        raise
    except Exception as error:  # builders raise what their files raise
        reason = str(error).strip().splitlines()
        raise DataError(
            f"{name!r}, split {split!r}, cannot be loaded ({reason[0][:200] if reason else type(error).__name__}). "
            "Check data.split and data.config_name."
        ) from error
    finally:
        if shows_bars:
            datasets.utils.logging.enable_progress_bar()
    return HubRows(name, _undecoded(dataset))


def _undecoded(dataset: Any) -> Any:
    """Return the data set with images as path and bytes: decoding each row's would cost more than its text."""
    import datasets

    for column, feature in dataset.features.items():
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(column, datasets.Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            dataset = dataset.cast_column(column, datasets.List(datasets.Image(decode=False)))
    return dataset


def first_good(source: RowSource, count: int, *, look_at: int = 1000) -> list[RawRow]:
    """Return up to ``count`` readable rows from the beginning of ``source``, looking at ``look_at`` rows at most."""
    good: list[RawRow] = []
    for start in range(0, min(len(source), look_at), 50):
        rows: Iterable[RawRow | BadRow] = source.fetch(range(start, min(start + 50, len(source))))
        good.extend(row for row in rows if isinstance(row, RawRow))
        if len(good) >= count:
            break
    return good[:count]
