"""Tiny tokenizers that the case scripts share: plain user code."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = ["how", "are", "you", "I", "am", "fine", "thank", "what", "is", "it", "a", "tree"]


def word_tokenizer(*, pad):
    """Return a tokenizer of whole words with BOS and EOS."""
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "<s>", "</s>", "[UNK]", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="[UNK]", pad_token=pad
    )


def byte_tokenizer():
    """Return a byte-level BPE that merges a newline with what follows."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False)
    backend.train_from_iterator([f"question {n}\n### Response: answer {n}" for n in range(50)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
