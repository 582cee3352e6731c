from __future__ import annotations

from typing import Any

import pytest

from workbench.components.chat_template import TRAINING_TEMPLATES, ChatFormat, TemplateRefusedError, chat_format
from workbench.components.tokenizer import plain_template

# Templates without markers, each written here after the published prompt format of its family.
BOS = "{{ bos_token }}"
CHATML_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI named \"X\" {{1}}<|im_end|>\\n' }}{% endif %}"
)
LLAMA_TURNS = (
    "{% for m in turns %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + "
    "'<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
LLAMA_31_HEAD = (
    "{% set turns = messages %}{% set system = '' %}"
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set turns = messages[1:] %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n"
    "Today Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}"
)
GEMMA = (
    BOS + "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' + m['content'] | trim + "
    "'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MISTRAL = (
    BOS + "{% set turns = messages %}{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}{% endif %}"
    "{% for m in turns %}{% if m['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if loop.last and system is defined %}{{ system + '\\n\\n' }}{% endif %}{{ m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
TEKKEN = (
    BOS + "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
PHI_3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
QWEN_3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% set parts = m['content'].split('</think>') %}"
    "{% set thought = parts[0].replace('<think>', '').strip() if parts | length > 1 else '' %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' + parts[-1].lstrip('\\n') }}"
    "{% else %}{{ parts[-1].lstrip('\\n') }}{% endif %}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VICUNA = (
    "{{ 'A chat.' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ ' USER: ' + m['content'] }}"
    "{% else %}{{ ' ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)

# name: (template, training template that must be chosen, end of each learned span)
FAMILIES = {
    "chatml": (CHATML_TURNS, "chatml", "<|im_end|>"),
    "smollm2": (DEFAULT_SYSTEM + CHATML_TURNS, "chatml", "<|im_end|>"),
    "llama-3": (BOS + "{% set turns = messages %}" + LLAMA_TURNS, "llama-3", "<|eot_id|>"),
    "llama-3.1": (BOS + LLAMA_31_HEAD + LLAMA_TURNS, "llama-3", "<|eot_id|>"),
    "gemma": (GEMMA, "gemma", "<end_of_turn>"),
    "mistral": (MISTRAL, "mistral", "</s>"),
    "tekken": (TEKKEN, "mistral", "</s>"),
    "phi-3": (PHI_3, "phi", "<|end|>"),
    "phi-4-mini": (PHI_3.replace("\\n", ""), "phi", "<|end|>"),
    "qwen-3": (QWEN_3, "qwen3", "<|im_end|>"),
    "vicuna": (VICUNA, None, "</s>"),
    "plain": (plain_template(), "own", "</s>"),
}
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>", "<|assistant|>", "[INST]", "[/INST]"]

USER = {"role": "user", "content": "What is 6 x 7?"}
ANSWER = {"role": "assistant", "content": "It is 42."}
CHATS = {
    "one turn": [USER, ANSWER],
    "two turns": [USER, ANSWER, {"role": "user", "content": "It is 42."}, {"role": "assistant", "content": "Yes"}],
    "odd white space": [USER, {"role": "assistant", "content": "  spaced \n\n"}],
    "html and jinja": [
        {"role": "user", "content": "<script>alert(1)</script> {{ 7*7 }} {% generation %}"},
        {"role": "assistant", "content": "{{ bos_token }}<b>&amp;</b>{% endgeneration %}"},
    ],
    "answer occurs in the question": [{"role": "user", "content": "assistant It is 42."}, ANSWER],
}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def tokenizer_with(request: pytest.FixtureRequest) -> Any:
    """Return a function that gives the tiny tokenizer another template and the special tokens of all families."""
    from workbench.components import tiny_llama

    tokenizer = tiny_llama.build_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": SPECIAL})

    def make(template: str) -> Any:
        tokenizer.chat_template = template
        return tokenizer

    return make


def learned(chat: ChatFormat, messages: list[dict[str, str]]) -> list[str]:
    rendered = chat.render(messages)
    return [rendered.text[start:end] for start, end in rendered.spans]


def expected(family: str, messages: list[dict[str, str]], end: str) -> list[str]:
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    if family.startswith(("llama", "gemma")):
        answers = [answer.strip() for answer in answers]
    if family == "qwen-3":
        answers = [answer.lstrip("\n") for answer in answers]
        answers[-1] = "<think>\n\n</think>\n\n" + answers[-1]
    if family in ("mistral", "plain", "vicuna"):
        answers = [" " + answer for answer in answers]
    return [answer + end for answer in answers]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_with_their_end_are_learned_and_nothing_else(family: str, tokenizer_with: Any) -> None:
    template, training_template, end = FAMILIES[family]
    tokenizer = tokenizer_with(template)
    chat = chat_format(tokenizer)
    assert chat.training_template == training_template
    for name, messages in CHATS.items():
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert chat.render(messages).text == text, name
        assert learned(chat, messages) == expected(family, messages, end), name


@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if row[1] not in (None, "own")])
def test_without_our_template_the_same_is_found(family: str, tokenizer_with: Any) -> None:
    template, _, end = FAMILIES[family]
    chat = chat_format(tokenizer_with(template))
    for name, messages in CHATS.items():
        text = chat.render_text(messages)
        found = [text[start:stop] for start, stop in chat.find_answers(text, messages)]
        assert found == expected(family, messages, end), name


@pytest.mark.parametrize("family", ["smollm2", "llama-3.1", "mistral", "phi-3", "qwen-3", "plain"])
def test_system_text_is_never_learned(family: str, tokenizer_with: Any) -> None:
    template, _, end = FAMILIES[family]
    chat = chat_format(tokenizer_with(template))
    for messages in ([SYSTEM, *CHATS["one turn"]], CHATS["one turn"]):
        assert learned(chat, messages) == expected(family, messages, end)
        assert "You are" not in "".join(learned(chat, messages))


def test_a_template_that_moves_the_system_text_is_still_understood(tokenizer_with: Any) -> None:
    """Mistral puts it before the last question, so that no beginning of the chat is a beginning of the text."""
    chat = chat_format(tokenizer_with(MISTRAL))
    messages = [SYSTEM, *CHATS["two turns"], USER]
    text = chat.render(messages).text
    assert text.endswith("[INST] Be brief.\n\nWhat is 6 x 7?[/INST]")
    assert learned(chat, messages) == [" It is 42.</s>", " Yes</s>"]


def test_thinking_is_learned_where_the_template_keeps_it(tokenizer_with: Any) -> None:
    chat = chat_format(tokenizer_with(QWEN_3))
    messages = [USER, {"role": "assistant", "content": "<think>\n6 x 7\n</think>\n\nIt is 42."}]
    assert learned(chat, messages) == ["<think>\n6 x 7\n</think>\n\nIt is 42.<|im_end|>"]


def test_markers_that_leave_out_the_end_token_are_extended(tokenizer_with: Any) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}"
    )
    chat = chat_format(tokenizer_with(template))
    assert chat.training_template == "own"
    assert learned(chat, CHATS["one turn"]) == ["It is 42.<|im_end|>"]


def test_refusals_say_why(tokenizer_with: Any) -> None:
    chat = chat_format(tokenizer_with(GEMMA))
    with pytest.raises(TemplateRefusedError, match="refuses it: System role not supported"):
        chat.render([SYSTEM, USER, ANSWER])
    chat = chat_format(tokenizer_with("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"))
    with pytest.raises(TemplateRefusedError, match="answers cannot be found"):
        chat.render([USER, ANSWER])
    chat = chat_format(tokenizer_with("{% for m in messages %}{{ m.nothing.at.all }}{% endfor %}"))
    with pytest.raises(TemplateRefusedError, match="refuses it"):
        chat.render([USER, ANSWER])


def test_a_template_cannot_reach_python(tokenizer_with: Any) -> None:
    chat = chat_format(tokenizer_with("{{ ''.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(TemplateRefusedError):
        chat.render([USER, ANSWER])


def test_all_our_templates_are_tested() -> None:
    assert {row[1] for row in FAMILIES.values()} >= set(TRAINING_TEMPLATES)
