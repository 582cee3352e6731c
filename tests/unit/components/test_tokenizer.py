from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.components import tiny_llama
from workbench.components.source import ModelSource, load_tokenizer
from workbench.components.tokenizer import has_tokenizer_files, plain_template
from workbench.errors import ModelError


def source_of(folder: Path) -> ModelSource:
    return ModelSource("mine", "folder", tiny_llama.config(), str(folder), None, True, True)


def test_a_tokenizer_without_template_or_pad_gets_both(tiny_tokenizer: Any, tmp_path: Path) -> None:
    tiny_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"pad_token": "<|endoftext|>",', ""))
    tokenizer = load_tokenizer(source_of(tmp_path))
    assert tokenizer.chat_template == plain_template()
    assert tokenizer.pad_token == tokenizer.eos_token
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "User: Hi\nAssistant: Ho<|im_end|>\n"
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "User: Hi\nAssistant:"


def test_broken_tokenizer_is_one_sentence(tiny_tokenizer: Any, tmp_path: Path) -> None:
    tiny_tokenizer.save_pretrained(tmp_path)
    assert has_tokenizer_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ModelError, match="The tokenizer of 'mine' cannot be read"):
        load_tokenizer(source_of(tmp_path))
