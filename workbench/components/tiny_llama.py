"""``tiny-llama``: a random model that loads in a blink, with a byte-level BPE tokenizer trained on the spot.

It learns nothing worth saying. It is there so that every code path runs in seconds: the same classes as a real Llama,
a chat template with ``{% generation %}`` markers, and a pad token that is not EOS.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelError
from ..events import Cancel, Progress, ProgressCallback
from .cache import build_once, cache_dir
from .quiet import no_progress_bars

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

NAME = "tiny-llama"
NOTE = "Random weights, made on this machine: for trying things out, not for use."

VOCAB_SIZE = 1024
WEIGHT_SEED = 0
# Raised whenever the files it makes change, so that an old cache folder is not used.
FORMAT = 1
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Modules whose docstrings are the tokenizer's corpus: small, in every Python.
CORPUS_MODULES = ("argparse", "textwrap", "random", "statistics", "datetime", "pathlib", "shutil", "logging")


def config() -> LlamaConfig:
    """Return its config: 3 layers, width 64, about 0.27 million parameters, float32."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def prepared_folder() -> str | None:
    """Return its folder in the user cache, or None while it has not been made."""
    folder = _folder()
    return str(folder) if folder.is_dir() else None


def prepare(*, progress: ProgressCallback | None = None, cancel: Cancel | None = None) -> str:
    """Make the model and its tokenizer once, in the user cache, and return the folder.

    Raises:
        ModelError: The cache cannot be written.
        Cancelled: The user cancelled.
    """
    folder = build_once(_folder(), _build, ModelError, cancel=cancel)
    if progress is not None:
        progress(Progress("load", 1, 1, f"{NAME} is ready"))
    return str(folder)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer on docstrings of the standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from . import python_docs

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(python_docs.read_texts(CORPUS_MODULES), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    template = resources.files(__package__).joinpath("tables/templates/chatml.jinja")
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def _folder() -> Path:
    # The corpus is this Python's standard library, so the folder is this Python's too.
    return cache_dir() / "models" / f"{NAME}-{FORMAT}-py{sys.version_info.major}{sys.version_info.minor}"


def _build(folder: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(WEIGHT_SEED)
        model = LlamaForCausalLM(config())
    with no_progress_bars():
        model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
