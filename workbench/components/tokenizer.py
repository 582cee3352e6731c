"""Tokenizers as training needs them: padded on the right, with a chat template, loaded from a local folder only."""

from __future__ import annotations

import functools
import pathlib
from importlib import resources
from typing import TYPE_CHECKING

from ..errors import ModelError
from .new_tokens import add_tokens
from .task import IMAGE_TEXT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .source import ModelSource


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Return the tokenizer of ``source``; of a model of images its processor, which holds the tokenizer.

    A tokenizer without a chat template (base models) gets a plain one, so that chats can be trained and the saved run
    can be talked to the same way. A missing pad token becomes EOS; training never recognises padding by its id.

    Raises:
        ModelError: The source has no tokenizer, or its files cannot be read.
    """
    from transformers import AutoTokenizer

    from .processor import load_processor

    if not source.has_tokenizer or source.path is None:
        raise ModelError(
            f"{source.name!r} comes without a tokenizer (only its config is known). "
            "Choose a model with files, such as smollm2-135m-instruct, a hub id or a local folder."
        )
    if source.task == IMAGE_TEXT:
        return load_processor(source)  # New tokens are refused for models of images.
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.path, local_files_only=True, trust_remote_code=source.trust_remote_code
        )
    except ImportError as error:
        raise ModelError(
            f"The tokenizer of {source.name!r} needs a package that is missing: {_first_line(error)}"
        ) from error
    except Exception as error:  # broken files raise whatever their parser raises
        raise ModelError(
            f"The tokenizer of {source.name!r} cannot be read ({_first_line(error)}). Fetch or save its files again."
        ) from error
    set_up_tokenizer(tokenizer)
    if getattr(source, "new_tokens", ()):
        add_tokens(tokenizer, source.new_tokens)
    return tokenizer


def set_up_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a tokenizer pad on the right, with a pad token, and render chats."""
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if not tokenizer.chat_template:
        tokenizer.chat_template = plain_template()


@functools.cache
def plain_template() -> str:
    """Return the chat template for tokenizers that have none: a line with the role, the text, EOS after answers."""
    return resources.files(__package__).joinpath("tables/templates/plain.jinja").read_text(encoding="utf-8")


def has_tokenizer_files(folder: str | pathlib.Path) -> bool:
    """Return whether ``folder`` holds a tokenizer."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tekken.json")
    return any((pathlib.Path(folder) / name).is_file() for name in names)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0][:200] if lines else type(error).__name__).rstrip(".")
