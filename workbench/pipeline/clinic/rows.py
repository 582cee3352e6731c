"""Faults of the data: what is learned, what ends a row, what the ids are."""

from __future__ import annotations

from typing import Any

import torch

from ...diagnose.finding import Finding
from ..checking import check
from ..watching import Watch
from .library import fault
from .parts import TinyModel, batch_of, byte_tokenizer, chat_rows, sgd, tiny_llama, token_rows, train, word_tokenizer

TEXTS = ("how are you", "I am fine thank you", "what is it", "it is a tree")


@fault("data.no_supervised_tokens")
def prompts_fill_the_rows(healthy: bool) -> list[Finding]:
    """Rows whose answer is cut off by the maximum length."""
    rows = token_rows(8)
    for row in rows[:2]:
        row["labels"] = [-100] * (4 if healthy else 12) + row["labels"][4 if healthy else 12 :]
    return check({"dataset": rows})


def _template(answer: str) -> Any:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }} {% else %}"
        + answer
        + "{% endif %}{% endfor %}"
    )
    return tokenizer


INSIDE = "{% generation %}{{ m['content'] }} </s>{% endgeneration %} "


@fault("data.no_generation_markers")
def template_without_markers(healthy: bool) -> list[Finding]:
    """A chat template that does not mark the assistant's turns."""
    tokenizer = _template(INSIDE if healthy else "{{ m['content'] }} </s> ")
    return check({"tokenizer": tokenizer, "dataset": chat_rows(), "assistant_only_loss": True})


@fault("data.eos_outside_span")
def end_outside_the_span(healthy: bool) -> list[Finding]:
    """A chat template whose marked span ends before the end of the turn."""
    tokenizer = _template(INSIDE if healthy else "{% generation %}{{ m['content'] }}{% endgeneration %} </s> ")
    return check({"tokenizer": tokenizer, "dataset": chat_rows(), "assistant_only_loss": True})


@fault("data.eos_not_learned")
def pad_is_the_end(healthy: bool) -> list[Finding]:
    """A padding token that is the end of sequence, and a collator that masks padding."""
    from transformers import DataCollatorForLanguageModeling

    tokenizer = word_tokenizer(pad="[PAD]" if healthy else "</s>")
    rows = [dict(tokenizer(f"{text} </s>")) for text in TEXTS]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return check({"tokenizer": tokenizer, "dataset": rows, "collator": collator})


@fault("data.marker_not_found")
def marker_is_tokenised_otherwise(healthy: bool) -> list[Finding]:
    """A response marker whose tokens are others inside a text."""
    tokenizer = byte_tokenizer()
    rows = [tokenizer(f"question {number}\n### Response: answer {number}") for number in range(6)]
    head = len(tokenizer("question 0")["input_ids"])
    marker = rows[0]["input_ids"][head : head + 4] if healthy else "### Response:"
    return check({"tokenizer": tokenizer, "dataset": rows, "response_template": marker})


@fault("data.double_bos")
def two_beginnings(healthy: bool) -> list[Finding]:
    """Text that begins with BOS already, tokenised with special tokens."""
    tokenizer = word_tokenizer(adds_bos=True)
    rows = [dict(tokenizer(f"<s> {text}", add_special_tokens=not healthy)) for text in TEXTS]
    return check({"tokenizer": tokenizer, "dataset": rows})


@fault("data.no_bos")
def no_beginning(healthy: bool) -> list[Finding]:
    """Rows without the BOS that their tokenizer puts before each text."""
    tokenizer = word_tokenizer(adds_bos=True)
    rows = [dict(tokenizer(text, add_special_tokens=healthy)) for text in TEXTS]
    return check({"tokenizer": tokenizer, "dataset": rows})


@fault("data.ids_out_of_range")
def token_outside_the_embedding(healthy: bool) -> Watch:
    """A token that was added to the tokenizer and not to the model."""
    model = TinyModel()

    def batches(step: int) -> dict[str, torch.Tensor]:
        batch = batch_of(step)
        batch["input_ids"][2, -1] = 3 if healthy else 64
        return batch

    return train(model, sgd(model), steps=2, batches=batches)


@fault("data.wrong_ignore_index")
def prompts_labelled_as_padding(healthy: bool) -> list[Finding]:
    """Prompts whose labels are the padding token's id."""
    rows = token_rows(8)
    for row in rows:
        row["labels"] = [-100 if healthy else 0] * 6 + row["labels"][6:]
    return check({"dataset": rows})


@fault("data.packing_leaks")
def packed_rows_see_each_other(healthy: bool) -> list[Finding]:
    """Two samples in one row, and a cache that makes the model ignore where they meet."""
    ids = batch_of(0, rows=1, length=24)["input_ids"]
    batch: dict[str, Any] = {"input_ids": ids, "position_ids": torch.arange(12).repeat(2)[None]}
    if healthy:
        batch["use_cache"] = False
    return check({"model": tiny_llama(), "batch": batch, "packing": True})


@fault("speed.padding_in_dataset")
def rows_are_padded(healthy: bool) -> list[Finding]:
    """Rows that are padded to one length in the data set itself."""
    rows = []
    for index in range(16):
        length = 8 + index % 5
        spare = 0 if healthy else 64 - length
        rows.append({"input_ids": list(range(3, 3 + length)) + [0] * spare,
                     "attention_mask": [1] * length + [0] * spare})  # fmt: skip
    return check({"dataset": rows})


@fault("speed.packing_underfilled")
def packer_sees_one_row(healthy: bool) -> list[Finding]:
    """A packer that is called with one document at a time."""
    documents = [list(range(3, 23 + (7 * number) % 25)) for number in range(32)]
    pools = [documents] if healthy else [[document] for document in documents]
    packed: list[list[int]] = []
    for pool in pools:
        packed.append([])
        for document in pool:
            if len(packed[-1]) + len(document) > 128:
                packed.append([])
            packed[-1] += document
    dataset = [{"input_ids": row + [0] * (128 - len(row)), "attention_mask": [1] * len(row) + [0] * (128 - len(row))}
               for row in packed]  # fmt: skip
    return check({"dataset": dataset, "packing": True})
