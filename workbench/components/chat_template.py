"""Which part of a rendered chat is learned: the assistant's answers with their end-of-turn token, nothing else.

The text is always the one of the model's own template. The places of the answers in it come from, in this order:

1. ``{% generation %}`` markers of that template, where it has them;
2. a training template of ours with markers (``tables/templates``), where it renders to the very same text;
3. a rendering with placeholders for the answers, put back one by one until the text is whole again;
4. renderings of the chat up to each answer, where they are beginnings of the whole.

A chat for which all four fail is a bad row: guessing would teach the model its own prompt.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

from .tokenizer import plain_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
Span = tuple[int, int]

# Stands for one image inside a text until the processor's own token takes its place. Unicode's object replacement
# character, which no text needs.
IMAGE_MARK = "\ufffc"

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Words of chats that probe a template. They hold no letters a template could treat specially.
_PROBE = ("Question zero", "Answer zero", "Question one", "Answer one")
_PLACEHOLDER = "Placeholder{index}Answer"


class TemplateRefusedError(ValueError):
    """The chat template cannot render this chat, or its answers cannot be found in the text."""


@dataclass(frozen=True)
class RenderedChat:
    """A chat as the model sees it.

    Attributes:
        text: The whole text.
        spans: ``(start, end)`` in characters of each answer with its end-of-turn token, ascending.
    """

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class ChatFormat:
    """Renders chats for one tokenizer and finds the answers in them.

    Attributes:
        template: The tokenizer's own template.
        training_template: Name of our template that renders the same text with markers; ``"own"`` when the tokenizer's
            has markers; None when answers are found by placeholders.
        special_tokens: Names and texts that templates use, e.g. ``{"bos_token": "<s>"}``.
        end_tokens: Texts that can end a turn: all special tokens of the tokenizer.
        variables: Values our training template needs.
        parts: Whether the template takes each message as a list of parts, as those of image models do.
    """

    template: str
    training_template: str | None
    special_tokens: Mapping[str, str]
    end_tokens: tuple[str, ...]
    variables: Mapping[str, str | None] = field(default_factory=dict)
    parts: bool = False

    def render(self, messages: Sequence[Message]) -> RenderedChat:
        """Render one chat.

        Raises:
            TemplateRefusedError: The template refuses the chat, or its answers cannot be found.
        """
        text, marked = self._own(messages)
        if self.training_template == "own":
            return RenderedChat(text, self._with_end_tokens(text, marked))
        if self.training_template is not None:
            marked_text, spans = _render(
                read_template(self.training_template), messages, {**self.special_tokens, **self.variables}
            )
            if marked_text == text:
                return RenderedChat(text, spans)
        return RenderedChat(text, self.find_answers(text, messages))

    def render_text(self, messages: Sequence[Message]) -> str:
        """Return the text of one chat without looking for its answers.

        Raises:
            TemplateRefusedError: The template refuses the chat.
        """
        return self._own(messages)[0]

    def _own(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> tuple[str, tuple[Span, ...]]:
        """Render with the model's own template."""
        chat: Sequence[Any] = messages
        if self.parts:
            chat = [{**message, "content": to_parts(message["content"])} for message in messages]
        return _render(self.template, chat, self.special_tokens, add_generation_prompt=add_generation_prompt)

    def find_answers(self, text: str, messages: Sequence[Message]) -> tuple[Span, ...]:
        """Return the spans of the answers in ``text`` without any markers.

        Raises:
            TemplateRefusedError: They cannot be found with certainty.
        """
        spans = self._by_placeholders(text, messages)
        spans = self._by_beginnings(text, messages) if spans is None else spans
        if spans is None:
            raise TemplateRefusedError("the answers cannot be found in the text that the chat template makes")
        return spans

    def _by_placeholders(self, text: str, messages: Sequence[Message]) -> tuple[Span, ...] | None:
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        masked = [dict(message) for message in messages]
        for index in answers:
            masked[index]["content"] = _PLACEHOLDER.format(index=index)
        try:
            pattern, _ = self._own(masked)
        except TemplateRefusedError:
            return None
        position = 0
        spans: list[Span] = []
        for index in answers:
            before, found, pattern = pattern.partition(_PLACEHOLDER.format(index=index))
            if not found or not text.startswith(before, position):
                return None
            position += len(before)
            content = _kept_content(text, position, messages[index]["content"], pattern, answers[-1] == index)
            if content is None:
                return None
            end = position + len(content)
            previous_end = spans[-1][1] if spans else 0
            spans.append((self._start_of_answer(text, messages[:index], previous_end, position), end))
            position = end
        if text[position:] != pattern:
            return None
        return self._with_end_tokens(text, tuple(spans))

    def _start_of_answer(self, text: str, before: Sequence[Message], low: int, high: int) -> int:
        """Return where the model's own writing begins: after the generation prompt, at most at the content."""
        try:
            prompt, _ = self._own(before, add_generation_prompt=True)
        except TemplateRefusedError:
            prompt = ""
        if prompt and low <= len(prompt) <= high and text.startswith(prompt):
            return len(prompt)
        # A space in front belongs to the first token of the answer in most vocabularies.
        start = high
        while start > low and text[start - 1] == " ":
            start -= 1
        return start

    def _by_beginnings(self, text: str, messages: Sequence[Message]) -> tuple[Span, ...] | None:
        spans: list[Span] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                prompt, _ = self._own(messages[:index], add_generation_prompt=True)
                upto, _ = self._own(messages[: index + 1])
            except TemplateRefusedError:
                return None
            start = _common_length(prompt, upto)
            end = _common_length(upto, text)
            whole = text[start:end]
            if end < len(upto.rstrip()) or message["content"].strip() not in whole or start < len(prompt.rstrip()):
                return None
            stripped = whole.rstrip()
            spans.append((start, start + len(stripped) if stripped.endswith(self.end_tokens) else end))
        return tuple(spans)

    def _with_end_tokens(self, text: str, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Extend each span over the end-of-turn token that follows it, so that the model learns to stop."""
        extended = []
        for start, end in spans:
            if not text[start:end].rstrip().endswith(self.end_tokens):
                token = next((token for token in self.end_tokens if text.startswith(token, end)), "")
                end += len(token)
            extended.append((start, end))
        return tuple(extended)


def chat_format(tokenizer: PreTrainedTokenizerBase, image_template: str | None = None) -> ChatFormat:
    """Return the ChatFormat of ``tokenizer``: its template, and the training template that fits it.

    Args:
        tokenizer: With its special tokens.
        image_template: Template of a processor, which takes messages in parts of text and images.
    """
    template = tokenizer.get_chat_template() if tokenizer.chat_template else plain_template()
    special = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        special.setdefault(name, "")
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    ends = tuple(sorted({text for text in (*tokenizer.all_special_tokens, *added) if text}, key=len, reverse=True))
    if image_template:
        marks = "own" if _MARKER.search(image_template) else None
        return ChatFormat(image_template, marks, special, ends, parts=True)
    return _fitting_format(template, tuple(sorted(special.items())), ends)


@functools.lru_cache(maxsize=32)
def _fitting_format(template: str, special: tuple[tuple[str, str], ...], ends: tuple[str, ...]) -> ChatFormat:
    own = ChatFormat(template, "own" if _MARKER.search(template) else None, dict(special), ends)
    if own.training_template is None:
        for name, find_variables in TRAINING_TEMPLATES.items():
            variables = find_variables(own)
            if variables is not None and _renders_the_same(own, name, variables):
                return ChatFormat(template, name, dict(special), ends, variables)
    return own


def to_parts(content: str) -> list[dict[str, str]]:
    """Return the parts of a message, texts and images, as templates of image models take them."""
    parts: list[dict[str, str]] = []
    for index, text in enumerate(content.split(IMAGE_MARK)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def read_template(name: str) -> str:
    """Return the text of one of our templates."""
    return _read_template(name)


@functools.cache
def _read_template(name: str) -> str:
    return resources.files(__package__).joinpath(f"tables/templates/{name}.jinja").read_text(encoding="utf-8")


def _renders_the_same(own: ChatFormat, name: str, variables: Mapping[str, str | None]) -> bool:
    """Return whether our template gives the text of the tokenizer's own for chats of one and two turns."""
    for probe in (_probe(2), _probe(4)):
        for prompt in (False, True):
            chat = probe[:-1] if prompt else probe
            try:
                expected, _ = _render(own.template, chat, own.special_tokens, add_generation_prompt=prompt)
                ours, _ = _render(
                    read_template(name), chat, {**own.special_tokens, **variables}, add_generation_prompt=prompt
                )
            except TemplateRefusedError:
                return False
            if expected != ours:
                return False
    return True


def _probe(length: int) -> list[Message]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": _PROBE[i]} for i in range(length)]


def _rendered_probe(own: ChatFormat) -> str:
    try:
        return _render(own.template, _probe(2), own.special_tokens)[0]
    except TemplateRefusedError:
        return ""


def _between(text: str, opening: str, closing: str) -> str | None:
    """Return what stands between ``opening`` at the beginning of ``text`` and the first ``closing``, or None."""
    if not text.startswith(opening):
        return None
    end = text.find(closing, len(opening))
    return text[len(opening) : end] if end >= 0 else None


def _chatml_variables(own: ChatFormat) -> dict[str, str | None] | None:
    text = _rendered_probe(own)
    if "<|im_start|>" not in text:
        return None
    return {"default_system": _between(text, "<|im_start|>system\n", "<|im_end|>\n")}


def _llama_variables(own: ChatFormat) -> dict[str, str | None] | None:
    text = _rendered_probe(own).removeprefix(own.special_tokens.get("bos_token", ""))
    if "<|start_header_id|>" not in text:
        return None
    return {"system_preamble": _between(text, "<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>")}


def _variables_by_word(word: str, name: str, value: str) -> Callable[[ChatFormat], dict[str, str | None] | None]:
    """Return a finder for templates with ``word``; variable ``name`` is ``value`` where it follows, else empty."""

    def find(own: ChatFormat) -> dict[str, str | None] | None:
        text = _rendered_probe(own)
        return {name: value if word + value in text else ""} if word in text else None

    return find


TRAINING_TEMPLATES: dict[str, Callable[[ChatFormat], dict[str, str | None] | None]] = {
    "chatml": _chatml_variables,
    "qwen3": lambda own: {} if "<think>" in _rendered_probe(own) else None,
    "llama-3": _llama_variables,
    "gemma": lambda own: {} if "<start_of_turn>" in _rendered_probe(own) else None,
    "mistral": _variables_by_word("[INST]", "space", " "),
    "phi": _variables_by_word("<|user|>", "newline", "\n"),
}


def _render(
    template: str, messages: Sequence[Any], variables: Mapping[str, Any], *, add_generation_prompt: bool = False
) -> tuple[str, tuple[Span, ...]]:
    """Return the text of a chat and the spans inside ``{% generation %}`` markers.

    transformers renders in a sandbox that cannot reach Python objects, files or the network.
    """
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            chat_template=template,
            return_assistant_tokens_mask=bool(_MARKER.search(template)),
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except (TemplateError, TypeError, KeyError, IndexError, AttributeError, ValueError, ZeroDivisionError) as error:
        reason = str(error).strip().splitlines()
        raise TemplateRefusedError(
            f"the chat template refuses it: {reason[0][:160] if reason else type(error).__name__}"
        ) from error
    return texts[0], tuple((start, end) for start, end in spans[0]) if spans else ()


def _kept_content(text: str, position: int, content: str, after: str, is_last: bool) -> str | None:
    """Return ``content`` as the template kept it (whole or stripped), where it is followed by what must follow."""
    following = after if is_last else after.partition("Placeholder")[0]
    for kept in (content, content.strip(), content.lstrip("\n"), content.strip("\n"), content.rstrip()):
        if text.startswith(kept, position) and text.startswith(following, position + len(kept)):
            return kept
    return None


def _common_length(first: str, second: str) -> int:
    """Return how many characters two texts share from their beginning."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])
