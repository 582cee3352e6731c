from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.components.rows import BadRow, RawRow, RowSource, first_good, open_file, open_rows
from workbench.errors import DataError
from workbench.recipe import Recipe


def fetch_all(source: RowSource) -> list[RawRow | BadRow]:
    return source.fetch(range(len(source)))


def values(source: RowSource) -> list[dict[str, object]]:
    return [row.values for row in fetch_all(source) if isinstance(row, RawRow)]


def test_json_lines_keep_their_line_numbers(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl({"text": "a"}, "", "{broken", {"text": "é"}, "[1]", '{"text": "b"}')
    source = open_file(path)
    rows = fetch_all(source)
    assert [row.line for row in rows] == [1, 3, 4, 5, 6]
    assert values(source) == [{"text": "a"}, {"text": "é"}, {"text": "b"}]
    assert [str(row) for row in rows if isinstance(row, BadRow)] == [
        "rows.jsonl, line 3: it is not JSON (Expecting property name enclosed in double quotes, column 2)",
        "rows.jsonl, line 5: it holds a list, not an object with named values",
    ]
    assert [row.line for row in source.fetch([3, 0])] == [5, 1]


def test_bytes_that_are_not_text_are_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "bom"}\r\n{"text": "\xff"}\r\n')
    first, second = fetch_all(open_file(path))
    assert isinstance(first, RawRow)
    assert first.values == {"text": "bom"}
    assert isinstance(second, BadRow)
    assert second.reason == "it is not UTF-8 text"


def test_deep_nesting_does_not_end_the_program(write_jsonl: Callable[..., Path]) -> None:
    row = fetch_all(open_file(write_jsonl("[" * 100_000)))[0]
    assert isinstance(row, BadRow)


@pytest.mark.parametrize(
    "content",
    ['[{"text": "a"}, {"text": "b"}]', '{"data": [{"text": "a"}, {"text": "b"}]}', '{"text": "a"}\n{"text": "b"}\n'],
)
def test_json_files_in_all_three_forms(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert values(open_file(path)) == [{"text": "a"}, {"text": "b"}]


def test_one_chat_in_a_json_file_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    assert len(open_file(path)) == 1


def test_broken_json_file_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('[\n{"text": "a"},\n{"text": }\n]')
    with pytest.raises(DataError, match=r"x.json, line 3: it is not JSON"):
        open_file(path)


def test_csv_with_line_breaks_and_a_broken_record(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('question,answer\n"one\ntwo",1\nonly one cell\n"a ""b""",<b>2</b>\n')
    rows = fetch_all(open_file(path))
    assert [row.line for row in rows] == [2, 4, 5]
    assert isinstance(rows[1], BadRow)
    assert rows[1].reason == "it has 1 cells where the header has 2"
    assert values(open_file(path)) == [
        {"question": "one\ntwo", "answer": "1"},
        {"question": 'a "b"', "answer": "<b>2</b>"},
    ]


def test_tsv_and_long_cells(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text("text\tn\n" + "x" * 200_000 + "\t1\n")
    assert len(str(values(open_file(path))[0]["text"])) == 200_000


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pa.table({"text": ["a", None, "c"], "n": [1, 2, 3]}), path)
    source = open_file(path)
    assert [row.values["text"] for row in source.fetch([2, 1])] == ["c", None]  # type: ignore[union-attr]
    assert [row.line for row in source.fetch([2])] == [3]
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match="not a Parquet file that can be read"):
        open_file(path)


def test_text_by_paragraph_and_by_line(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("one\ntwo\n\n\nthree\n")
    assert [(row.line, row.values["text"]) for row in fetch_all(open_file(path))] == [  # type: ignore[union-attr]
        (1, "one\ntwo"),
        (5, "three"),
    ]
    path.write_text("one\ntwo\n")
    assert [row["text"] for row in values(open_file(path))] == ["one", "two"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt"])
@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_empty_files_say_what_to_write(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=r'holds no rows. Write at least one, for example the line {"messages"'):
        open_file(path)


def test_a_header_alone_holds_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("question,answer\n")
    with pytest.raises(DataError, match="holds no rows"):
        open_file(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere.jsonl", "There is no file 'nowhere.jsonl'"),
        ("/no/such/thing", "There is no file '/no/such/thing'"),
        ("<img src=x onerror=alert(1)>", "There is no file '<img src=x onerror=alert\\(1\\)>'"),
        ("owner/rows", "the hub does not answer.*Give a local file"),
    ],
)
def test_missing_data(silent_hub: list[str], name: str, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        open_rows(Recipe().with_changes({"data.name_or_path": name}))


def test_folders_and_unknown_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is a folder. Give one file"):
        open_file(tmp_path)
    (tmp_path / "x.pkl").write_bytes(b"cos\nsystem\n")
    with pytest.raises(DataError, match=r"'x.pkl' is of no known kind"):
        open_file(tmp_path / "x.pkl")


def test_first_good_skips_broken_rows(write_jsonl: Callable[..., Path]) -> None:
    source = open_file(write_jsonl("{", "{", {"text": "a"}, "{", {"text": "b"}, {"text": "c"}))
    assert [row.values["text"] for row in first_good(source, 2)] == ["a", "b"]
