"""Classifiers: rows to classes, labels to batches, the loss of a step, and the head that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.components.collator import build_collator
from workbench.components.data import prepare_data, preview_rows
from workbench.components.loss import compute_loss, evaluate_batch
from workbench.components.model import build_model
from workbench.components.source import find_source
from workbench.components.task import with_classes
from workbench.errors import DataError, ModelError
from workbench.recipe import Recipe, find_problems

from .tiny import CPU

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 1024,
}  # fmt: skip


@pytest.fixture
def labelled(write_jsonl: Any) -> Path:
    rows = [{"text": f"sentence number {index}", "label": ("calm", "angry", "glad")[index % 3]} for index in range(30)]
    return write_jsonl(*rows)


def recipe_of(path: Path, **changes: Any) -> Recipe:
    return Recipe().with_changes(
        {"model.task": "sequence-classification", "model.config": CONFIG, "data.name_or_path": str(path), **changes}
    )


def test_names_become_ids_in_order_and_each_row_has_one_label(tiny_tokenizer: Any, labelled: Path) -> None:
    data = prepare_data(recipe_of(labelled), tiny_tokenizer)
    assert data.classes == ("angry", "calm", "glad")
    assert sum(data.report.classes.values()) == len(data.train) == data.num_supervised_tokens
    row = data.train[0]
    text = tiny_tokenizer.decode(row["input_ids"])
    expected = ("calm", "angry", "glad")[int(text.rsplit(" ", 1)[-1]) % 3]
    assert data.classes[int(row["labels"][0])] == expected


def test_known_classes_keep_their_ids(tiny_tokenizer: Any, labelled: Path) -> None:
    data = prepare_data(recipe_of(labelled), tiny_tokenizer, known_classes=("glad", "calm", "angry", "sad"))
    assert data.classes == ("glad", "calm", "angry", "sad")


def test_whole_numbers_are_ids_and_fractions_are_bad_rows(tiny_tokenizer: Any, write_jsonl: Any) -> None:
    rows = [{"text": f"text {index}", "label": 2 * (index % 2)} for index in range(20)]
    data = prepare_data(recipe_of(write_jsonl(*rows, {"text": "half", "label": 0.5})), tiny_tokenizer)
    assert data.classes == ("0", "1", "2")  # 1 is missing in the data and keeps its place
    assert {int(row["labels"][0]) for row in data.train} == {0, 2}
    assert data.report.num_bad_rows == 1 and "whole number or a name" in data.report.bad_rows[0].reason


@pytest.mark.parametrize(
    ("rows", "changes", "said"),
    [
        ([{"text": "a", "kind": "x"}, {"text": "b", "kind": "y"}], {}, "data.label_column"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "x"}], {}, "needs two"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}, {"text": "c", "label": "z"}],
         {"model.num_labels": 2}, "model.num_labels=3"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_classes_is_said(
    tiny_tokenizer: Any, write_jsonl: Any, rows: Any, changes: Any, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        prepare_data(recipe_of(write_jsonl(*rows), **changes), tiny_tokenizer)


def test_pairs_of_texts_are_read_together(tiny_tokenizer: Any, write_jsonl: Any) -> None:
    rows = [{"premise": f"rain {i}", "hypothesis": f"wet {i}", "label": i % 2} for i in range(20)]
    data = prepare_data(recipe_of(write_jsonl(*rows)), tiny_tokenizer)
    assert data.report.format == "premise and hypothesis, classified by label"
    text = tiny_tokenizer.decode(data.train[0]["input_ids"])
    assert "rain" in text and "wet" in text


def test_the_preview_names_the_class(tiny_tokenizer: Any, labelled: Path) -> None:
    row = preview_rows(recipe_of(labelled), tiny_tokenizer, 1)[0]
    assert row.label == "calm" and "".join(text for text, _ in row.tokens) == "sentence number 0"
    assert not any(is_learned for _, is_learned in row.tokens) and row.num_supervised == 1


def test_the_language_model_inside_one_of_images_and_text_learns_the_padding_too() -> None:
    inside = {"model_type": "qwen3_5", "text_config": {"vocab_size": 64, "eos_token_id": 7}}
    recipe = Recipe().with_changes({"model.task": "sequence-classification", "model.config": inside})
    source = find_source(recipe, for_training=False)
    source.config.pad_token_id = source.config.get_text_config().pad_token_id = None
    assert with_classes(recipe, source).config.get_text_config().pad_token_id == 7
    assert with_classes(recipe, source, (), 5).config.get_text_config().pad_token_id == 5


def test_micro_batches_add_up_to_the_mean_over_rows(tiny_tokenizer: Any, labelled: Path) -> None:
    recipe = recipe_of(labelled)
    data, collator = prepare_data(recipe, tiny_tokenizer), build_collator(recipe, tiny_tokenizer)
    source = with_classes(recipe, find_source(recipe, for_training=False), data.classes, collator.pad_token_id)
    assert source.config.id2label == {0: "angry", 1: "calm", 2: "glad"}
    torch.manual_seed(0)
    model = build_model(recipe, source, CPU, place="cpu", allow_random_weights=True).eval()
    samples = [data.train[index] for index in range(6)]
    whole = collator(samples)
    assert whole["labels"].shape == (6,) and collator.count(whole).num_supervised_tokens == 6
    with torch.no_grad():
        mean = compute_loss(recipe, model, whole, None)
        parts = sum(compute_loss(recipe, model, collator(samples[at : at + 2]), 6) for at in (0, 2, 4))
        total, num_right = evaluate_batch(recipe, model, whole)
        logits = model(**{name: value for name, value in whole.items() if name != "labels"}).logits
    torch.testing.assert_close(parts, mean)
    torch.testing.assert_close(total, 6 * mean)
    assert int(num_right) == int((logits.argmax(-1) == whole["labels"]).sum())
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any(".score." in name for name in trainable) and any("lora_" in name for name in trainable)


def test_a_model_without_a_head_for_the_task_is_refused_with_one_that_it_has() -> None:
    recipe = Recipe().with_changes({"model.task": "image-text-to-text", "model.config": CONFIG})
    with pytest.raises(ModelError, match=r"model\.task=causal-lm"):
        find_source(recipe, for_training=False)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model.task": "sequence-classification", "data.packing": True}, "data.packing"),
        ({"model.task": "image-text-to-text", "data.packing": True}, "data.packing"),
        ({"model.task": "sequence-classification", "training.loss_type": "chunked_nll"}, "training.loss_type"),
        ({"model.task": "sequence-classification", "data.format": "chat"}, "data.format"),
        ({"model.task": "seq2seq-lm", "data.format": "text"}, "data.format"),
        ({"model.num_labels": 3}, "model.num_labels"),
        ({"data.label_column": "kind"}, "data.label_column"),
        ({"data.image_column": "photo"}, "data.image_column"),
    ],
)
def test_wrong_combinations_are_named_with_a_value_that_works(changes: dict[str, Any], field: str) -> None:
    recipe = Recipe().with_changes(changes)
    (problem,) = [each for each in find_problems(recipe) if each.field == field]
    fixed = recipe.with_changes(dict(problem.fix))
    assert not [each for each in find_problems(fixed) if each.field == field]
