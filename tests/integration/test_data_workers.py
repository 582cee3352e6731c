"""Tokenizing with several processes gives the same data set as with one."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.components import tiny_llama
from workbench.components.data import prepare_data
from workbench.errors import Cancelled
from workbench.events import Cancel, Progress
from workbench.recipe import Recipe


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_llama.build_tokenizer()


def test_two_processes_are_one(tokenizer: Any) -> None:
    recipe = Recipe().with_changes({"data.max_rows": 600})
    one = prepare_data(recipe, tokenizer)
    two = prepare_data(recipe.with_changes({"data.num_proc": 2}), tokenizer)
    for first, second in zip(one.train, two.train, strict=True):
        assert first["input_ids"].tolist() == second["input_ids"].tolist()
        assert first["labels"].tolist() == second["labels"].tolist()
    assert one.lengths.tolist() == two.lengths.tolist()
    assert one.num_supervised_tokens == two.num_supervised_tokens


def test_processes_end_when_cancelled(tokenizer: Any) -> None:
    cancel = Cancel()

    def stop_after_first(progress: Progress) -> None:
        if progress.done > 64:  # past the held-out rows
            cancel.set()

    with pytest.raises(Cancelled):
        prepare_data(Recipe().with_changes({"data.num_proc": 2}), tokenizer, progress=stop_after_first, cancel=cancel)
