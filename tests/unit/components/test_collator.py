from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from workbench.components.collator import Collator, TokenCounts, build_collator, count_tokens
from workbench.recipe import Recipe


def sample(ids: list[int], labels: list[int] | None = None, positions: list[int] | None = None) -> dict[str, Any]:
    row = {"input_ids": np.array(ids, dtype=np.int32), "labels": np.array(labels or ids, dtype=np.int32), "length": 1}
    return row if positions is None else {**row, "position_ids": np.array(positions, dtype=np.int32)}


def test_full_batch_has_no_mask() -> None:
    batch = Collator(pad_token_id=0)([sample([1, 2]), sample([3, 4])])
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert count_tokens(batch) == TokenCounts(4, 0, 2)


def test_padding_is_marked_by_length_not_by_id() -> None:
    """The pad token is EOS here, as in SmolLM2: the real EOS at the end of an answer must stay learned and seen."""
    eos = 2
    batch = Collator(pad_token_id=eos)([sample([5, 6, eos]), sample([7, eos])])
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[5, 6, eos], [7, eos, -100]]
    assert batch["input_ids"].tolist() == [[5, 6, eos], [7, eos, eos]]
    assert count_tokens(batch) == TokenCounts(5, 1, 3)


def test_fixed_length() -> None:
    batch = Collator(pad_token_id=0, length=4)([sample([1, 2])])
    assert batch["input_ids"].shape == (1, 4)
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0]]
    full = Collator(pad_token_id=0, length=2)([sample([1, 2])])
    assert "attention_mask" not in full


def test_packed_batches_bring_positions_and_never_a_mask() -> None:
    rows = [sample([1, 2, 3, 4, 5], positions=[0, 1, 2, 0, 1]), sample([6, 7, 8], positions=[0, 1, 2])]
    batch = Collator(pad_token_id=9)(rows)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 0]]
    assert batch["labels"][1].tolist() == [6, 7, 8, -100, -100]
    assert count_tokens(batch) == TokenCounts(8, 2, 6)


def test_supervised_counts_leave_out_the_first_label() -> None:
    batch = Collator(pad_token_id=0)([sample([1, 2, 3], labels=[1, -100, 3])])
    assert count_tokens(batch).num_supervised_tokens == 1


def test_built_from_the_recipe(tiny_tokenizer: Any) -> None:
    recipe = Recipe().with_changes({"data.max_length": 32})
    assert build_collator(recipe, tiny_tokenizer) == Collator(tiny_tokenizer.pad_token_id, None)
    fixed = recipe.with_changes({"data.padding": "max_length"})
    assert build_collator(fixed, tiny_tokenizer).length == 32


def test_loader_workers_can_have_it() -> None:
    assert pickle.loads(pickle.dumps(Collator(3, 8))) == Collator(3, 8)
