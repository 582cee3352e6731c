from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from workbench.components import python_docs
from workbench.errors import Cancelled, DataError
from workbench.events import Cancel

SAMPLE = '''
def shown(a, b: int = 2, *rest) -> str:
    """Return something that is described in more than forty characters."""

def _hidden():
    """This one is private, however long its docstring may well be."""

def silent(): ...

class Thing(Base):
    """A thing whose docstring also has more than forty characters."""

    async def act(self):
        """Act in a way that takes more than forty characters to say."""
'''


def test_entries_of_a_module() -> None:
    entries = list(python_docs._entries_in_tree("mod", ast.parse(SAMPLE)))
    assert [(e.name, e.kind, e.signature) for e in entries] == [
        ("mod.shown", "function", "def shown(a, b: int=2, *rest) -> str"),
        ("mod.Thing", "class", "class Thing(Base)"),
        ("mod.Thing.act", "method", "async def act(self)"),
    ]


def test_a_row_is_a_question_and_an_answer() -> None:
    entry = next(python_docs._entries_in_tree("mod", ast.parse(SAMPLE)))
    user, assistant = entry.as_row()["messages"]  # type: ignore[misc]
    assert user["role"] == "user"
    assert "`mod.shown`" in user["content"]
    assert assistant["content"].startswith("```python\ndef shown(a, b: int=2, *rest) -> str\n```\n\nReturn something")
    assert entry.as_row() == entry.as_row()


def test_long_docs_end_with_a_whole_paragraph() -> None:
    doc = "First paragraph. " * 20 + "\n\n" + "Second. " * 300
    short = python_docs._shortened(doc)
    assert short == ("First paragraph. " * 20).rstrip()
    assert len(python_docs._shortened("x" * 5000)) == python_docs.MAX_DOC_CHARS


def test_thousands_of_rows_the_same_each_time_and_nothing_imported(own_cache: Path, tmp_path: Path) -> None:
    before = set(sys.modules)
    path = python_docs.prepare()
    assert not {"antigravity", "turtle", "tkinter", "idlelib", "smtplib"} & (set(sys.modules) - before)
    assert path.is_relative_to(own_cache)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 2000
    assert len({row["messages"][1]["content"] for row in rows}) > 0.99 * len(rows)
    assert {"json.dumps", "str.split", "math.isclose", "pathlib.Path.glob"} <= {row["name"] for row in rows}
    again = [entry.as_row() for entry in python_docs.collect_entries(["json", "math"])]
    assert again == [row for row in rows if row["name"].split(".")[0] in ("json", "math")]


def test_cancelled_in_the_middle_leaves_no_file(own_cache: Path) -> None:
    cancel = Cancel()
    with pytest.raises(Cancelled):
        python_docs.prepare(progress=lambda p: cancel.set() if p.done == 5 else None, cancel=cancel)
    assert not list(own_cache.rglob("*.jsonl"))


def test_a_cache_that_cannot_be_written(own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"cannot be written.*WORKBENCH_CACHE"):
        python_docs.prepare()
