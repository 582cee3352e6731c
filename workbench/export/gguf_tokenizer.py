"""The tokenizer inside a GGUF file: tokens, their kinds, merges or scores, and the rule by which text is split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ExportError

# Kinds of tokens, ``gguf.TokenType``.
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
UNKNOWN = 2

# How a tokenizer splits text before it merges, and llama.cpp's name for it (llama-vocab.cpp, ``tokenizer.ggml.pre``).
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS: dict[tuple[str, ...], str] = {
    ("bytes by words",): "gpt-2",
    ("digits", "bytes by words"): "smollm",
    (_LLAMA3_SPLIT, "bytes"): "llama-bpe",
    (_QWEN2_SPLIT, "bytes"): "qwen2",
}


def add_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """Add the tokenizer of a folder to a GGUF file.

    Args:
        writer: A ``gguf.GGUFWriter`` whose file is not open yet.
        folder: Has ``tokenizer.json`` and what else ``AutoTokenizer`` reads.
        vocab_size: Rows of the model's embeddings; rows without a token are named as unused.

    Raises:
        ExportError: The tokenizer is of a kind that cannot be written here.
    """
    from transformers import AutoTokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ExportError("GGUF needs the tokenizer's tokenizer.json, which this model lacks. Export it as merged.")
    written = json.loads(path.read_text(encoding="utf-8"))
    if written["model"].get("type") != "BPE":
        raise ExportError(
            f"A tokenizer of type {written['model'].get('type')} cannot be written as GGUF; BPE can. "
            "Export it as merged."
        )
    tokens, kinds = _tokens(written, vocab_size)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = [
        tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in written["model"]["merges"]
    ]
    if written["model"].get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix(_adds_space(written))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name_split(written))
        writer.add_token_merges([" ".join(merge) for merge in merges])
    _add_special(writer, AutoTokenizer.from_pretrained(folder))


def name_split(written: dict[str, Any]) -> str:
    """Return llama.cpp's name for the way a byte-level tokenizer splits text.

    Args:
        written: The content of ``tokenizer.json``.

    Raises:
        ExportError: There is none here.
    """
    step = written.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", [step])
    found = SPLITS.get(tuple(_name_step(each) for each in steps))
    if found is None:
        kinds = " + ".join(str(each.get("type")) for each in steps)
        raise ExportError(
            f"The tokenizer splits text in a way ({kinds}) that has no GGUF name here; "
            f"{', '.join(SPLITS.values())} do. Export it as merged, and convert that with llama.cpp's own "
            "convert_hf_to_gguf.py."
        )
    return found


def _name_step(step: dict[str, Any]) -> str:
    if step.get("type") == "ByteLevel" and not step.get("add_prefix_space"):
        return "bytes by words" if step.get("use_regex", True) else "bytes"
    if step.get("type") == "Digits" and step.get("individual_digits"):
        return "digits"
    if step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return str(step.get("pattern", {}).get("Regex"))
    return "other"


def _tokens(written: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the token and its kind for every row of the embeddings."""
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    is_byte = bool(written["model"].get("byte_fallback"))
    unknown = written["model"].get("unk_token")
    for text, index in written["model"]["vocab"].items():
        if index < vocab_size:
            tokens[index] = text
            kinds[index] = BYTE if is_byte and len(text) == 6 and text.startswith("<0x") else NORMAL
    for added in written.get("added_tokens", []):
        if added["id"] < vocab_size:
            tokens[added["id"]] = added["content"]
            kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if unknown in tokens:
        kinds[tokens.index(unknown)] = UNKNOWN
    return tokens, kinds


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """Return SentencePiece's scores: the earlier a token is merged, the higher.

    llama.cpp joins the pair whose token has the highest score; BPE the pair whose merge comes first.
    """
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    return [-float(ranks[token]) if token in ranks else -1e6 for token in tokens]


def _adds_space(written: dict[str, Any]) -> bool:
    text = json.dumps([written.get("normalizer"), written.get("pre_tokenizer")])
    return '"Prepend"' in text or '"prepend_scheme": "first"' in text or '"prepend_scheme": "always"' in text


def _add_special(writer: Any, tokenizer: Any) -> None:
    ids = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "unk", "pad")}
    for name, index in ids.items():
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    encoded = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(ids["bos"] is not None and encoded[:1] == [ids["bos"]])
    writer.add_add_eos_token(ids["eos"] is not None and encoded[-1:] == [ids["eos"]])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
