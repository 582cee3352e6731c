from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.components.data import build_dataset, prepare_data
from workbench.errors import Cancelled, DataError
from workbench.events import Cancel, Progress
from workbench.recipe import Recipe

RecipeFor = Callable[..., Recipe]
WriteJsonl = Callable[..., Path]


def question(index: int) -> dict[str, str]:
    return {"question": f"Number {index}?", "answer": f"The number is {index}. " * (1 + index % 7)}


@pytest.fixture
def hundred(write_jsonl: WriteJsonl) -> Path:
    return write_jsonl(*[question(index) for index in range(100)])


def texts(tokenizer: Any, dataset: Any) -> list[str]:
    return [tokenizer.decode(row["input_ids"]) for row in dataset]


def test_columns_lengths_and_counts(tiny_tokenizer: Any, hundred: Path, recipe_for: RecipeFor) -> None:
    data = prepare_data(recipe_for(hundred), tiny_tokenizer)
    assert data.train.column_names == ["input_ids", "labels", "length"]
    assert (len(data.train), len(data.evaluation or ())) == (90, 10)
    assert data.lengths.dtype == np.int32
    assert data.lengths.tolist() == [len(row["input_ids"]) for row in data.train] == list(data.train["length"])
    assert data.num_tokens == data.lengths.sum()
    assert data.num_supervised_tokens == sum(int((row["labels"] != -100).sum()) for row in data.train)
    report = data.report
    assert (report.num_rows, report.num_train_rows, report.num_evaluation_rows, report.num_bad_rows) == (100, 90, 10, 0)
    assert report.format == "chats made of question and answer"
    assert report.supervised_fraction == data.num_supervised_tokens / data.num_tokens
    assert sum(report.histogram.counts) == 90


def test_held_out_rows_are_fixed_and_order_follows_the_seed(
    tiny_tokenizer: Any, hundred: Path, recipe_for: RecipeFor
) -> None:
    first = prepare_data(recipe_for(hundred), tiny_tokenizer)
    same = prepare_data(recipe_for(hundred), tiny_tokenizer)
    other = prepare_data(recipe_for(hundred, training__seed=1, data__max_rows=30), tiny_tokenizer)
    assert texts(tiny_tokenizer, first.train) == texts(tiny_tokenizer, same.train)
    assert texts(tiny_tokenizer, first.evaluation) == texts(tiny_tokenizer, other.evaluation)
    assert len(other.train) == 30
    assert texts(tiny_tokenizer, other.train) != texts(tiny_tokenizer, first.train)[:30]
    assert not set(texts(tiny_tokenizer, other.train)) & set(texts(tiny_tokenizer, other.evaluation))


def test_evaluation_choices(tiny_tokenizer: Any, hundred: Path, recipe_for: RecipeFor, write_jsonl: WriteJsonl) -> None:
    none = prepare_data(recipe_for(hundred, evaluation__split="none"), tiny_tokenizer)
    assert none.evaluation is None
    assert len(none.train) == 100
    few = prepare_data(recipe_for(hundred, evaluation__max_rows=3), tiny_tokenizer)
    assert len(few.evaluation or ()) == 3
    other = write_jsonl(*[question(index) for index in range(200, 210)], name="held.jsonl")
    named = prepare_data(recipe_for(hundred, evaluation__split=str(other)), tiny_tokenizer)
    assert (len(named.train), len(named.evaluation or ())) == (100, 10)
    with pytest.raises(DataError, match=r"has no split 'test'. Set evaluation.split to auto, none"):
        prepare_data(recipe_for(hundred, evaluation__split="test"), tiny_tokenizer)
    tiny = prepare_data(recipe_for(write_jsonl(question(1), question(2), name="two.jsonl")), tiny_tokenizer)
    assert tiny.evaluation is None
    assert "nothing is evaluated" in " ".join(tiny.report.notes)


def test_half_broken_file_trains_on_the_rest_and_says_so(
    tiny_tokenizer: Any, write_jsonl: WriteJsonl, recipe_for: RecipeFor
) -> None:
    rows: list[Any] = []
    for index in range(60):
        rows += [question(index), '{"question": "cut off', {"question": "no answer"}]
    data = prepare_data(recipe_for(write_jsonl(*rows), evaluation__split="none"), tiny_tokenizer)
    assert len(data.train) == 60
    assert data.report.num_bad_rows == 120
    assert len(data.report.bad_rows) == 20
    assert [str(row) for row in data.report.bad_rows[:2]] == [
        "rows.jsonl, line 2: it is not JSON (Unterminated string starting at, column 14)",
        "rows.jsonl, line 3, answer: it is missing",
    ]
    assert "120 rows cannot be used and are left out. The first: rows.jsonl, line 2" in data.report.notes[0]


@pytest.mark.parametrize(
    ("rows", "changes", "expected"),
    [
        (["{", "{"], {}, "line 1: it is not JSON.*correct that line first"),
        ([{"question": "x", "answer": ""}] * 3, {}, "line 1, answer: it is empty. The other 2 rows cannot be used"),
        (
            [{"messages": [{"role": "user", "content": "x"}]}],
            {},
            "line 1, messages: it has no message of the assistant.*data.train_on=all",
        ),
        ([{"question": "x " * 50, "answer": "y"}], {"data__max_length": 16}, "nothing to learn.*Raise data.max_length"),
    ],
)
def test_nothing_to_train_on_is_one_sentence_with_line_and_reason(
    tiny_tokenizer: Any,
    write_jsonl: WriteJsonl,
    recipe_for: RecipeFor,
    rows: list[Any],
    changes: dict[str, Any],
    expected: str,
) -> None:
    with pytest.raises(DataError, match=expected) as caught:
        prepare_data(recipe_for(write_jsonl(*rows), **changes), tiny_tokenizer)
    assert "\n" not in str(caught.value)


def test_long_rows_are_cut_and_reported(tiny_tokenizer: Any, hundred: Path, recipe_for: RecipeFor) -> None:
    data = prepare_data(recipe_for(hundred, data__max_length=48), tiny_tokenizer)
    assert data.lengths.max() == 48
    assert data.raw_lengths.max() > 48
    assert data.report.truncated_fraction == (data.raw_lengths > 48).mean() > 0
    assert "are cut at the end" in " ".join(data.report.notes)


def test_packing_keeps_every_token(tiny_tokenizer: Any, hundred: Path, recipe_for: RecipeFor) -> None:
    loose = prepare_data(recipe_for(hundred, data__max_length=256), tiny_tokenizer)
    packed = prepare_data(recipe_for(hundred, data__max_length=256, data__packing=True), tiny_tokenizer)
    assert packed.train.column_names == ["input_ids", "labels", "position_ids", "length"]
    assert len(packed.train) < len(loose.train) / 2
    assert packed.lengths.max() <= 256
    assert packed.lengths.tolist() == list(packed.train["length"])
    assert packed.num_tokens == loose.num_tokens == packed.lengths.sum()
    assert packed.num_supervised_tokens == loose.num_supervised_tokens
    assert sum(int((row["labels"] != -100).sum()) for row in packed.train) == loose.num_supervised_tokens
    assert "position_ids" not in (packed.evaluation.column_names if packed.evaluation else ())
    share = 1 - packed.num_tokens / (len(packed.train) * 256)
    assert packed.report.padding.packing == pytest.approx(share)


def test_progress_and_cancel(tiny_tokenizer: Any, hundred: Path, recipe_for: RecipeFor) -> None:
    seen: list[Progress] = []
    prepare_data(recipe_for(hundred), tiny_tokenizer, progress=seen.append)
    assert {item.stage for item in seen} == {"tokenize"}
    assert (seen[-1].done, seen[-1].total) == (90, 90)
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        prepare_data(recipe_for(hundred), tiny_tokenizer, cancel=cancel)


def test_a_tokenizer_that_pads_with_eos_still_learns_eos(
    tiny_tokenizer: Any, hundred: Path, recipe_for: RecipeFor
) -> None:
    import copy

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    data = prepare_data(recipe_for(hundred), tokenizer)
    assert all(tokenizer.eos_token_id in row["labels"] for row in data.train)


def test_dataset_of_uneven_rows() -> None:
    rows = [np.array([1, 2], dtype=np.int32), np.array([3], dtype=np.int32)]
    dataset = build_dataset({"input_ids": rows, "labels": rows})
    assert [row["input_ids"].tolist() for row in dataset] == [[1, 2], [3]]
    assert list(dataset["length"]) == [2, 1]
