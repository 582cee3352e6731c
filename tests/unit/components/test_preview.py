from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.components.preview import preview_rows
from workbench.errors import DataError
from workbench.recipe import Recipe

RecipeFor = Callable[..., Recipe]


def chat(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "<b>Q</b> 日本"}, {"role": "assistant", "content": answer}]}


def test_tokens_join_to_the_text_and_show_what_is_learned(
    tiny_tokenizer: Any, write_jsonl: Callable[..., Path], recipe_for: RecipeFor
) -> None:
    path = write_jsonl("{broken", chat("<script>x</script> 🎉"), chat("two"), chat("three"))
    rows = preview_rows(recipe_for(path), tiny_tokenizer, num_rows=2)
    assert len(rows) == 2
    expected = tiny_tokenizer.apply_chat_template(chat("<script>x</script> 🎉")["messages"], tokenize=False)
    assert "".join(text for text, _ in rows[0].tokens) == expected.rstrip("\n") + "\n"
    assert "".join(text for text, flag in rows[0].tokens if flag) == "<script>x</script> 🎉<|im_end|>"
    assert rows[0].place == "rows.jsonl, line 2"
    assert rows[0].num_tokens == rows[0].num_raw_tokens == len(rows[0].tokens)
    assert rows[0].num_supervised == sum(flag for _, flag in rows[0].tokens)


def test_cut_rows_say_so(tiny_tokenizer: Any, write_jsonl: Callable[..., Path], recipe_for: RecipeFor) -> None:
    path = write_jsonl({"text": "many words " * 50})
    (row,) = preview_rows(recipe_for(path, data__max_length=12), tiny_tokenizer)
    assert row.was_truncated
    assert (row.num_tokens, len(row.tokens)) == (12, 12)
    assert row.num_raw_tokens > 12


def test_tokens_that_stand_for_no_text_are_named(
    tiny_tokenizer: Any, write_jsonl: Callable[..., Path], recipe_for: RecipeFor
) -> None:
    (row,) = preview_rows(recipe_for(write_jsonl({"text": "a b"})), tiny_tokenizer)
    assert row.tokens[-1] == ("<|im_end|>", True)


def test_no_usable_row(tiny_tokenizer: Any, write_jsonl: Callable[..., Path], recipe_for: RecipeFor) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl, line 1: it is not JSON.*No row of rows.jsonl can be read"):
        preview_rows(recipe_for(write_jsonl("{", "{")), tiny_tokenizer)
    with pytest.raises(DataError, match=r"line 1, answer: it is empty\. None of the first 2 rows"):
        path = write_jsonl(*[{"question": "x", "answer": ""}] * 2)
        preview_rows(recipe_for(path), tiny_tokenizer)
