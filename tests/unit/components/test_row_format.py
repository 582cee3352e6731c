from __future__ import annotations

from typing import Any

import pytest

from workbench.components.row_format import ChatRow, PairRow, RowFormat, TextRow, detect_format
from workbench.components.rows import BadRow, RawRow
from workbench.errors import DataError
from workbench.recipe.parts import DataPart

MESSAGES = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


def read(values: dict[str, Any], **data: Any) -> Any:
    raw = RawRow(values, "f.jsonl", 7)
    return detect_format(DataPart(**data), [raw], "f.jsonl").read(raw)


def pairs(row: Any) -> list[tuple[str, str]]:
    assert isinstance(row, ChatRow)
    return [(message["role"], message["content"]) for message in row.messages]


@pytest.mark.parametrize(
    "values",
    [
        {"messages": MESSAGES},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"chat": '[{"role": "User", "content": "Q"}, {"role": "assistant", "content": "A"}]'},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, MESSAGES[1]]},
        {"question": "Q", "answer": "A"},
        {"instruction": "Q", "output": "A"},
        {"instruction": "Q", "input": "", "output": "A"},
        {"prompt": "Q", "response": "A", "text": "unused"},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    ],
)
def test_all_ways_to_write_the_same_chat(values: dict[str, Any]) -> None:
    assert pairs(read(values)) == [("user", "Q"), ("assistant", "A")]


def test_instruction_with_input_and_system() -> None:
    row = read({"system": "S", "instruction": "Sort", "input": "3 1 2", "output": "1 2 3"})
    assert pairs(row) == [("system", "S"), ("user", "Sort\n\n3 1 2"), ("assistant", "1 2 3")]
    assert pairs(read({"system": "S", "messages": MESSAGES}))[0] == ("system", "S")


def test_prompt_and_completion_are_joined_as_they_stand() -> None:
    assert read({"prompt": "2+2=", "completion": "4"}) == PairRow("2+2=", "4")
    assert pairs(read({"prompt": "2+2=", "completion": "4"}, format="chat")) == [("user", "2+2="), ("assistant", "4")]


def test_answers_of_a_prompt_of_messages_are_context() -> None:
    row = read({"prompt": [*MESSAGES, {"role": "user", "content": "Q2"}], "completion": MESSAGES[1:]})
    assert row.context_turns == 1


def test_text() -> None:
    assert read({"text": "T", "id": 3}) == TextRow("T")
    assert read({"only": "T"}) == TextRow("T")


def test_the_recipe_overrides_names() -> None:
    values = {"a": "1", "b": "2", "text": "T", "messages": MESSAGES}
    assert read(values, prompt_column="a", completion_column="b") == PairRow("1", "2")
    assert read(values, text_column="a") == TextRow("1")
    assert read(values, format="text") == TextRow("T")
    assert pairs(read({"talk": MESSAGES}, messages_column="talk")) == [("user", "Q"), ("assistant", "A")]
    assert read({"question": 1, "answer": 2}, format="prompt_completion") == PairRow("1", "2")


def test_unknown_columns_are_listed_with_what_to_set() -> None:
    with pytest.raises(DataError, match=r"columns are 'x', '<b>y</b>'\. Set data\.messages_column"):
        read({"x": 1, "<b>y</b>": 2})
    with pytest.raises(DataError, match=r"has no column 'z' \(data\.text_column\)"):
        read({"x": "1"}, text_column="z")
    with pytest.raises(DataError, match=r"no columns that data.format=chat needs"):
        read({"text": "x", "n": 1}, format="chat")


@pytest.mark.parametrize(
    ("values", "field", "reason"),
    [
        ({"messages": None}, "messages", "it is missing"),
        ({"messages": []}, "messages", "it holds no messages"),
        ({"messages": "hello"}, "messages", "it is a text, not a list of messages"),
        ({"messages": ["hello"]}, "messages[0]", "it is a str, not a message with role and content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "it is missing"),
        ({"messages": [MESSAGES[0], {"role": "assistant"}]}, "messages[1].content", "it is missing"),
        ({"messages": [MESSAGES[0], {"role": "assistant", "content": " "}]}, "messages[1].content", "it is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content", "not text"),
    ],
)
def test_bad_messages_name_field_and_reason(values: dict[str, Any], field: str, reason: str) -> None:
    bad = RowFormat("chat", messages_column="messages").read(RawRow(values, "f", 7))
    assert isinstance(bad, BadRow)
    assert (bad.line, bad.field) == (7, field)
    assert reason in bad.reason


@pytest.mark.parametrize(
    ("values", "field", "reason"),
    [
        ({"question": "Q"}, "answer", "it is missing"),
        ({"question": "Q", "answer": None}, "answer", "it is empty"),
        ({"question": "Q", "answer": "  "}, "answer", "it is empty"),
        ({"question": ["Q"], "answer": "A"}, "question", "it is a list, not a text"),
    ],
)
def test_bad_pairs_name_field_and_reason(values: dict[str, Any], field: str, reason: str) -> None:
    form = RowFormat("chat", prompt_column="question", completion_column="answer")
    assert form.read(RawRow(values, "f", 7)) == BadRow("f", 7, field, reason)
