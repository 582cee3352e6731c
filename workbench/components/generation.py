"""What a model answers: a chat in its own template, and tokens chosen one by one, told as text while they come."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import ModelError
from .quiet import no_progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands at the end of a text whose last character has not all of its bytes yet.
_HALF = "\ufffd"


class Stopper(Protocol):
    """What ends an answer early: a ``Cancel``, or whatever else can be set."""

    @property
    def is_set(self) -> bool:
        """Whether to end at the next token."""


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> str:
    """Return a chat as the model reads it, up to where its answer begins."""
    return str(tokenizer.apply_chat_template(list(map(dict, messages)), tokenize=False, add_generation_prompt=True))


def generate_text(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 256,
    on_text: Callable[[str], Any] | None = None,
    cancel: Stopper | None = None,
) -> str:
    """Return what the model writes after ``prompt``: always the likeliest token, so that two models can be compared.

    No random number is drawn, so that a run goes on as if nobody had asked.

    Args:
        model: A causal language model in evaluation mode.
        tokenizer: Its tokenizer.
        prompt: As ``render_prompt`` returns it, special tokens in it; or as tokens.
        max_new_tokens: Tokens after which it stops anyway.
        on_text: Told the whole text so far after every token.
        cancel: Ends the answer at the next token; what is there is returned.

    Raises:
        ModelError: The prompt leaves no room for an answer.
    """
    given = tokenizer(prompt, add_special_tokens=False)["input_ids"] if isinstance(prompt, str) else list(prompt)
    ids = torch.tensor([given], dtype=torch.long, device=next(model.parameters()).device)
    room = _context(model) - ids.shape[1]
    if room < 1:
        raise ModelError(
            f"The prompt has {ids.shape[1]} tokens; the model reads {_context(model)} at most. Shorten the prompt."
        )
    streamer = _Streamer(tokenizer, on_text)
    with torch.no_grad(), no_progress_bars(), warnings.catch_warnings():
        # Its generation config may hold settings of sampling, which this does not do.
        warnings.simplefilter("ignore", UserWarning)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(max_new_tokens, room),
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            use_cache=True,
            eos_token_id=_ends(model, tokenizer),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            streamer=streamer,
            stopping_criteria=[_stopper(cancel)] if cancel is not None else None,
        )
    return streamer.text


def _context(model: Any) -> int:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    return int(getattr(config, "max_position_embeddings", None) or 1 << 20)


def _ends(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every token that ends an answer: the model's own and the tokenizer's, which training has taught."""
    own = getattr(model.generation_config, "eos_token_id", None)
    found = list(own) if isinstance(own, list | tuple) else [own]
    return [int(one) for one in dict.fromkeys([*found, tokenizer.eos_token_id]) if one is not None]


class _Streamer:
    """Takes tokens from ``generate`` and keeps the text of the answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], Any] | None) -> None:
        self.text = ""
        self._tokenizer, self._on_text = tokenizer, on_text
        self._ids: list[int] = []
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then one token after the other."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._ids += [int(one) for one in value.reshape(-1).tolist()]
        self.text = str(self._tokenizer.decode(self._ids, skip_special_tokens=True)).rstrip(_HALF)
        if self._on_text is not None:
            self._on_text(self.text)

    def end(self) -> None:
        """Nothing is left to do."""


def _stopper(cancel: Stopper) -> Callable[..., torch.Tensor]:
    def is_over(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), cancel.is_set, dtype=torch.bool, device=input_ids.device)

    return is_over
