"""GGUF files: every architecture reads back as it was, by transformers; what has no place there is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from workbench.components.tiny_llama import build_tokenizer
from workbench.errors import ExportError
from workbench.export.gguf_file import FILE_NAME, require_mappable, write_gguf
from workbench.export.gguf_tokenizer import name_split
from workbench.export.readers import reader_of

SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama 3.1": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES | {"head_dim": 32}, tie_word_embeddings=True),
}
IDS = (torch.arange(80).reshape(2, 40) * 37 + 11) % 1024


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def save_model(name: str, tokenizer: Any, folder: Path) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()
        for parameter in model.parameters():  # large enough that a mistake in any of them shows in the logits
            parameter.data.mul_(4) if parameter.ndim > 1 else parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def difference(model: Any, merged: Path, kind: str, target: Path) -> float:
    target.mkdir()
    write_gguf(merged, target, kind, "x")
    with reader_of(kind, target, merged) as (read, _), torch.no_grad():
        before = model(IDS).logits
        return float((read(IDS, torch.ones_like(IDS)) - before).abs().mean() / before.std())


@pytest.mark.parametrize("name", list(MODELS))
def test_each_architecture_reads_back_as_it_was(name: str, tokenizer: Any, tmp_path: Path) -> None:
    model = save_model(name, tokenizer, tmp_path / "merged")
    assert difference(model, tmp_path / "merged", "gguf-f16", tmp_path / "f16") < 0.002
    assert difference(model, tmp_path / "merged", "gguf-q8_0", tmp_path / "q8") < 0.03


def test_the_scaling_of_llama_3_1_is_stored_as_factors(tokenizer: Any, tmp_path: Path) -> None:
    import gguf
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = save_model("llama 3.1", tokenizer, tmp_path)
    write_gguf(tmp_path, tmp_path, "gguf-q8_0", "x")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / FILE_NAME).tensors}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert torch.allclose(plain / torch.from_numpy(tensors["rope_freqs.weight"].copy()), scaled, rtol=1e-5)
    assert float((plain / scaled).max()) == pytest.approx(8.0)  # something is scaled


def test_fewer_bits_are_smaller_and_lose_more(tokenizer: Any, tmp_path: Path) -> None:
    import gguf

    model = save_model("llama", tokenizer, tmp_path / "merged")
    kinds = ("gguf-bf16", "gguf-q8_0", "gguf-q4_0")
    lost = [difference(model, tmp_path / "merged", kind, tmp_path / kind) for kind in kinds]
    sizes = [(tmp_path / kind / FILE_NAME).stat().st_size for kind in kinds]
    assert lost == sorted(lost) and sizes == sorted(sizes, reverse=True) and lost[-1] < 0.4
    assert difference(model, tmp_path / "merged", "gguf-q4_1", tmp_path / "q4_1") < lost[-1]
    stored = {
        tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "gguf-q4_0/model.gguf").tensors
    }
    assert stored["blk.0.attn_q.weight"] == "Q4_0" and stored["blk.0.attn_norm.weight"] == "F32"
    assert stored["output.weight"] == stored["token_embd.weight"] == "Q8_0"


def test_the_tokenizer_in_the_file_is_the_models(tokenizer: Any, tmp_path: Path) -> None:
    save_model("llama", tokenizer, tmp_path / "merged")
    write_gguf(tmp_path / "merged", tmp_path, "gguf-f16", "x")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=FILE_NAME)
    text = "Hello w\u00f6rld 1234 <|im_start|>user\n  x = [1, 2]<|im_end|>"
    assert found(text).input_ids == tokenizer(text).input_ids
    assert (found.eos_token_id, found.chat_template) == (tokenizer.eos_token_id, tokenizer.chat_template)


def test_a_sentencepiece_tokenizer_keeps_its_merges(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bpe.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    bpe.train_from_iterator([__doc__, Path(__file__).read_text()], trainer)
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    save_model("llama", whole, tmp_path / "merged")
    write_gguf(tmp_path / "merged", tmp_path, "gguf-q8_0", "x")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=FILE_NAME)
    text = "every architecture reads the parameters"
    ours = [token for token in found(text).input_ids if token != found.bos_token_id]
    assert ours == whole(text).input_ids and len(ours) < len(text) / 2


def test_what_has_no_place_in_gguf_is_refused_by_name() -> None:
    with pytest.raises(ExportError, match="'gpt2' cannot be written as GGUF; llama, mistral, qwen2, qwen3 can"):
        require_mappable(transformers.GPT2Config())
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    with pytest.raises(ExportError, match="'yarn' cannot be written as GGUF; default, linear, llama3 can"):
        require_mappable(transformers.LlamaConfig(**SIZES, rope_parameters=yarn))


def test_ways_to_split_text_have_llama_cpps_names() -> None:
    words = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    assert name_split({"pre_tokenizer": words}) == "gpt-2"
    assert name_split({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, words]}}) == "smollm"
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    split = {"type": "Split", "pattern": {"Regex": PRETOKENIZE_REGEX}, "behavior": "Isolated", "invert": False}
    plain = words | {"use_regex": False}
    assert name_split({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, plain]}}) == "qwen2"
    with pytest.raises(ExportError, match=r"\(Whitespace\) that has no GGUF name here; gpt-2, smollm"):
        name_split({"pre_tokenizer": {"type": "Whitespace"}})
