"""What the columns of a row mean: chat messages, prompt and completion, or plain text.

Instruction and question data become chats, so that they are learned in the words of the model's own template. Only
columns that are called ``prompt`` and ``completion`` (or are chosen as such) are joined as they stand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DataError
from ..recipe.parts import DataPart
from .rows import BadRow, RawRow

MESSAGES_COLUMNS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog")
PAIR_COLUMNS = (("prompt", "completion"),)
QUESTION_COLUMNS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("instruction", "completion"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("prompt", "response"),
    ("prompt", "answer"),
    ("prompt", "output"),
    ("input", "output"),
    ("problem", "solution"),
)
TEXT_COLUMNS = ("text", "content", "document", "article")
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A chat. ``context_turns`` is how many of its first answers are context, not to be learned."""

    messages: list[dict[str, str]]
    context_turns: int = 0


@dataclass(frozen=True, slots=True)
class PairRow:
    """A prompt and the text that follows it."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class TextRow:
    """A plain text; all of it is learned."""

    text: str


Row = ChatRow | PairRow | TextRow


@dataclass(frozen=True)
class RowFormat:
    """How rows of one data set are read.

    Attributes:
        kind: ``"chat"``, ``"prompt_completion"`` or ``"text"``.
        messages_column: Column of the chat messages, or empty.
        prompt_column, completion_column: Columns of question and answer, or empty.
        input_column: Column that is added to the prompt (``input`` of instruction data), or empty.
        text_column: Column of plain text, or empty.
    """

    kind: str
    messages_column: str = ""
    prompt_column: str = ""
    completion_column: str = ""
    input_column: str = ""
    text_column: str = ""

    def describe(self) -> str:
        """Return one phrase for a person, e.g. ``"chats made of question and answer"``."""
        if self.messages_column:
            return f"chats in {self.messages_column}"
        if self.text_column:
            return f"plain text in {self.text_column}"
        pair = f"{self.prompt_column} and {self.completion_column}"
        return f"chats made of {pair}" if self.kind == "chat" else f"{pair}, joined as they stand"

    def read(self, raw: RawRow) -> Row | BadRow:
        """Return the row that ``raw`` means, or what is wrong with it."""
        try:
            if self.messages_column:
                return self._read_messages(raw.values)
            if self.text_column:
                return TextRow(text_of(raw.values, self.text_column, needed=True))
            return self._read_pair(raw.values)
        except FieldError as error:
            return BadRow(raw.file, raw.line, error.field, error.reason)

    def _read_messages(self, values: Mapping[str, Any]) -> ChatRow:
        messages = _messages(values.get(self.messages_column), self.messages_column)
        system = values.get("system")
        if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return ChatRow(messages)

    def _read_pair(self, values: Mapping[str, Any]) -> Row:
        prompt, completion = values.get(self.prompt_column), values.get(self.completion_column)
        if isinstance(prompt, list) and isinstance(completion, list):  # both are lists of messages
            before = _messages(prompt, self.prompt_column)
            after = _messages(completion, self.completion_column)
            return ChatRow(before + after, sum(message["role"] == "assistant" for message in before))
        question = text_of(values, self.prompt_column, needed=self.kind == "chat")
        answer = text_of(values, self.completion_column, needed=True)
        extra = values.get(self.input_column) if self.input_column else None
        if isinstance(extra, str) and extra.strip():
            question = f"{question}\n\n{extra}"
        if self.kind == "prompt_completion":
            return PairRow(question, answer)
        system = values.get("system")
        messages = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return ChatRow(messages)


class FieldError(ValueError):
    """A column of a row is wrong: which one, and what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field, self.reason = field, reason


def detect_format(data: DataPart, rows: Sequence[RawRow], name: str) -> RowFormat:
    """Return how rows are to be read: what the Recipe says, else what the columns of the first ``rows`` are called.

    Raises:
        DataError: A column that the Recipe names is not there, or no known columns are.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row.values))
    for field in ("messages_column", "prompt_column", "completion_column", "text_column"):
        chosen = getattr(data, field)
        if chosen and chosen not in columns:
            raise DataError(
                f"{name} has no column {chosen!r} (data.{field}). Its columns are {listed_columns(columns)}."
            )
    found = _chosen_format(data, columns, rows) or _named_format(data.format, columns, rows)
    if found is None:
        wanted = "" if data.format == "auto" else f" that data.format={data.format} needs"
        raise DataError(
            f"{name} has no columns{wanted} that are known by name; its columns are {listed_columns(columns)}. "
            "Set data.messages_column, data.prompt_column with data.completion_column, or data.text_column."
        )
    return found


def _chosen_format(data: DataPart, columns: Sequence[str], rows: Sequence[RawRow]) -> RowFormat | None:
    """Return the format of the columns that the Recipe names, or None when it names none (or not enough)."""
    if data.messages_column and data.format in ("auto", "chat"):
        return RowFormat("chat", messages_column=data.messages_column)
    if data.text_column and data.format in ("auto", "text"):
        return RowFormat("text", text_column=data.text_column)
    if data.format != "text" and (data.prompt_column or data.completion_column):
        for prompt, completion in (*PAIR_COLUMNS, *QUESTION_COLUMNS):
            prompt, completion = data.prompt_column or prompt, data.completion_column or completion
            if prompt in columns and completion in columns and prompt != completion:
                return RowFormat(
                    "chat" if data.format == "chat" else "prompt_completion",
                    prompt_column=prompt,
                    completion_column=completion,
                )
    return None


def _named_format(wanted: str, columns: Sequence[str], rows: Sequence[RawRow]) -> RowFormat | None:
    if wanted in ("auto", "chat"):
        for column in MESSAGES_COLUMNS:
            if column in columns and any(_looks_like_messages(row.values.get(column)) for row in rows):
                return RowFormat("chat", messages_column=column)
    if wanted != "text":
        for pairs, kind in ((PAIR_COLUMNS, "prompt_completion"), (QUESTION_COLUMNS, "chat")):
            for prompt, completion in pairs:
                if prompt in columns and completion in columns:
                    kind = kind if wanted == "auto" else wanted
                    extra = "input" if "input" in columns and "input" not in (prompt, completion) else ""
                    return RowFormat(kind, prompt_column=prompt, completion_column=completion, input_column=extra)
    if wanted in ("auto", "text"):
        for column in TEXT_COLUMNS:
            if column in columns:
                return RowFormat("text", text_column=column)
        if len(columns) == 1 and any(isinstance(row.values.get(columns[0]), str) for row in rows):
            return RowFormat("text", text_column=columns[0])
    return None


def _looks_like_messages(value: Any) -> bool:
    if isinstance(value, str) and value.lstrip().startswith("["):
        return True
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def listed_columns(columns: Sequence[str]) -> str:
    """Return the names of columns for a message."""
    shown = ", ".join(repr(column)[:60] for column in columns[:12])
    return (shown or "none") + (f" and {len(columns) - 12} more" if len(columns) > 12 else "")


def text_of(values: Mapping[str, Any], column: str, *, needed: bool) -> str:
    """Return the text in ``column``.

    Raises:
        FieldError: It is missing, not a text, or empty where it is ``needed``.
    """
    if column not in values:
        raise FieldError(column, "it is missing")
    value = values[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise FieldError(column, "it is empty" if value is None else f"it is a {type(value).__name__}, not a text")
    text = value if isinstance(value, str) else str(value)
    if needed and not text.strip():
        raise FieldError(column, "it is empty")
    return text


def _messages(value: Any, column: str) -> list[dict[str, str]]:
    """Return chat messages with ``role`` and ``content`` from either spelling.

    Raises:
        FieldError: It is no list of messages, or one of them is incomplete.
    """
    if isinstance(value, str):  # CSV and some Parquet files hold the list as JSON text
        try:
            value = json.loads(value)
        except ValueError:
            raise FieldError(column, "it is a text, not a list of messages") from None
    if value is None or value == []:
        raise FieldError(column, "it is missing" if value is None else "it holds no messages")
    if not isinstance(value, list):
        raise FieldError(column, f"it is a {type(value).__name__}, not a list of messages")
    return [_message(item, f"{column}[{index}]") for index, item in enumerate(value)]


def _message(item: Any, field: str) -> dict[str, str]:
    if not isinstance(item, Mapping):
        raise FieldError(field, f"it is a {type(item).__name__}, not a message with role and content")
    role = item.get("role", item.get("from"))
    if not isinstance(role, str) or not role.strip():
        raise FieldError(f"{field}.role", "it is missing")
    content = item.get("content", item.get("value"))
    if isinstance(content, list):  # parts, as multimodal chats have them
        parts = [
            part.get("text") for part in content if isinstance(part, Mapping) and part.get("type", "text") == "text"
        ]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise FieldError(f"{field}.content", "it has parts that are not text")
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise FieldError(
            f"{field}.content", "it is missing" if content is None else f"it is a {type(content).__name__}, not a text"
        )
    role = ROLES.get(role.strip().lower(), role.strip().lower())
    if role == "assistant" and not content.strip():
        raise FieldError(f"{field}.content", "it is empty")
    return {"role": role, "content": content}
