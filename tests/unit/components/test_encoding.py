from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.components.encoding import IGNORED, Encoded, Encoder, supervised_tokens
from workbench.components.row_format import RowFormat
from workbench.components.rows import BadRow, RawRow
from workbench.recipe.parts import DataPart

CHAT = RowFormat("chat", messages_column="messages")
PAIR = RowFormat("prompt_completion", prompt_column="prompt", completion_column="completion")
TEXT = RowFormat("text", text_column="text")
MESSAGES = [{"role": "user", "content": "Say <|im_end|> ö"}, {"role": "assistant", "content": "Ja 🎉"}]


def encode(tokenizer: Any, row_format: RowFormat, values: dict[str, Any], **data: Any) -> Encoded | BadRow:
    return Encoder(DataPart(**data), tokenizer, row_format).encode([RawRow(values, "f", 1)])[0]


def learned(tokenizer: Any, sample: Encoded | BadRow) -> str:
    assert isinstance(sample, Encoded)
    return tokenizer.decode(sample.input_ids[sample.labels != IGNORED])


def test_chat_learns_the_answer_with_its_end(tiny_tokenizer: Any) -> None:
    sample = encode(tiny_tokenizer, CHAT, {"messages": MESSAGES})
    assert learned(tiny_tokenizer, sample) == "Ja 🎉<|im_end|>"
    assert isinstance(sample, Encoded)
    text = tiny_tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert sample.input_ids.tolist() == tiny_tokenizer(text, add_special_tokens=False)["input_ids"]


def test_train_on_all_learns_all_but_the_first(tiny_tokenizer: Any) -> None:
    sample = encode(tiny_tokenizer, CHAT, {"messages": MESSAGES}, train_on="all")
    assert isinstance(sample, Encoded)
    assert (sample.labels == IGNORED).tolist() == [True] + [False] * (sample.input_ids.size - 1)


def test_context_turns_are_not_learned(tiny_tokenizer: Any) -> None:
    form = RowFormat("chat", prompt_column="prompt", completion_column="completion")
    values = {"prompt": [*MESSAGES, MESSAGES[0]], "completion": [{"role": "assistant", "content": "Nein"}]}
    assert learned(tiny_tokenizer, encode(tiny_tokenizer, form, values)) == "Nein<|im_end|>"


def test_pair_learns_the_completion_and_eos(tiny_tokenizer: Any) -> None:
    sample = encode(tiny_tokenizer, PAIR, {"prompt": "2 + 2 =", "completion": " 4"})
    assert learned(tiny_tokenizer, sample) == " 4<|im_end|>"


def test_text_learns_all_and_eos_once(tiny_tokenizer: Any) -> None:
    for text in ("some words", "some words<|im_end|>"):
        sample = encode(tiny_tokenizer, TEXT, {"text": text})
        assert isinstance(sample, Encoded)
        assert (sample.input_ids == tiny_tokenizer.eos_token_id).sum() == 1
        assert sample.labels[-1] == tiny_tokenizer.eos_token_id
        assert (sample.labels == IGNORED).sum() == 1


def test_bos_is_added_once_where_the_tokenizer_adds_it(tiny_tokenizer: Any) -> None:
    import copy

    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    for form, values in ((TEXT, {"text": "words"}), (PAIR, {"prompt": "a", "completion": "b"})):
        sample = encode(tokenizer, form, values)
        assert isinstance(sample, Encoded)
        assert sample.input_ids[0] == 0
        assert (sample.input_ids == 0).sum() == 1
    chat = encode(tokenizer, CHAT, {"messages": MESSAGES})
    assert isinstance(chat, Encoded)
    assert (chat.input_ids == 0).sum() == 0


def test_cutting_keeps_the_beginning_and_the_raw_length(tiny_tokenizer: Any) -> None:
    whole = encode(tiny_tokenizer, TEXT, {"text": "word " * 100})
    cut = encode(tiny_tokenizer, TEXT, {"text": "word " * 100}, max_length=16)
    assert isinstance(whole, Encoded)
    assert isinstance(cut, Encoded)
    assert cut.input_ids.tolist() == whole.input_ids[:16].tolist()
    assert cut.raw_length == whole.input_ids.size
    assert tiny_tokenizer.eos_token_id not in cut.labels


def test_rows_without_anything_to_learn_are_bad(tiny_tokenizer: Any) -> None:
    long_question = [{"role": "user", "content": "word " * 100}, MESSAGES[1]]
    bad = encode(tiny_tokenizer, CHAT, {"messages": long_question}, max_length=16)
    assert isinstance(bad, BadRow)
    assert "nothing to learn is left after cutting" in bad.reason
    bad = encode(tiny_tokenizer, CHAT, {"messages": MESSAGES[:1]})
    assert isinstance(bad, BadRow)
    assert "no message of the assistant" in bad.reason


def test_outcomes_keep_the_order_of_the_rows(tiny_tokenizer: Any) -> None:
    encoder = Encoder(DataPart(), tiny_tokenizer, TEXT)
    rows = [RawRow({"text": "a b"}, "f", 1), BadRow("f", 2, "", "x"), RawRow({}, "f", 3), RawRow({"text": "c"}, "f", 4)]
    kinds = [type(outcome) for outcome in encoder.encode(rows)]
    assert kinds == [Encoded, BadRow, BadRow, Encoded]


@pytest.mark.parametrize(
    ("offsets", "spans", "expected"),
    [
        ([(0, 2), (2, 4), (4, 6)], [(2, 4)], [False, True, False]),
        ([(0, 3), (3, 5)], [(2, 5)], [True, True]),  # reaches into the span: the answer could not begin without it
        ([(0, 0), (0, 2), (2, 2)], [(0, 2)], [False, True, False]),  # tokens that stand for no text
        ([(0, 1), (1, 2), (1, 2)], [(1, 2)], [False, True, True]),  # one character of two tokens
        ([(0, 2)], [], [False]),
    ],
)
def test_supervised_tokens(offsets: list[tuple[int, int]], spans: list[Any], expected: list[bool]) -> None:
    assert supervised_tokens(np.array(offsets), spans).tolist() == expected


def test_tokenizers_without_offsets_learn_the_same(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "Here it is: yes"}]
    fast = encode(tiny_tokenizer, CHAT, {"messages": messages})
    monkeypatch.setattr(type(tiny_tokenizer), "is_fast", property(lambda _: False))
    slow = encode(tiny_tokenizer, CHAT, {"messages": messages})
    assert isinstance(fast, Encoded)
    assert isinstance(slow, Encoded)
    assert slow.labels.tolist() == fast.labels.tolist()
