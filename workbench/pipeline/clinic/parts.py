"""What the faults of the clinic are made of: tiny models, batches, tokenizers, and the loop that most of them share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..watching import Watch, watch

VOCABULARY = 64
Batch = dict[str, Tensor]
# What a fault may raise on its way out of a loop; the watch has explained it by then.
EXPECTED = (RuntimeError, ValueError, IndexError, KeyError)


class TinyModel(nn.Module):
    """An embedding and two layers; returns loss and logits in a mapping as language models do."""

    def __init__(self, *, vocabulary: int = VOCABULARY, hidden: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.up, self.head = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, vocabulary)
        self.config = SimpleNamespace(vocab_size=vocabulary)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, as the models of transformers do."""
        return self.embed

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return ``logits`` and, with labels, ``loss``."""
        logits = self.head(torch.relu(self.up(self.embed(input_ids))))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tiny_llama(*, layers: int = 1, hidden: int = 16, vocabulary: int = VOCABULARY, **settings: Any) -> Any:
    """Return a random Llama of a few thousand parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **settings,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def lora_config(**settings: Any) -> Any:
    """Return a small LoRA configuration."""
    from peft import LoraConfig

    return LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings})


def tiny_lora(model: Any = None, **settings: Any) -> Any:
    """Return a tiny Llama with an adapter."""
    from peft import get_peft_model

    return get_peft_model(model or tiny_llama(), lora_config(**settings))


def adam(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Return AdamW over what trains."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def sgd(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Return plain gradient descent over what trains."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def batch_of(seed: int, *, rows: int = 4, length: int = 8, vocabulary: int = VOCABULARY) -> Batch:
    """Return random ids, shape (rows, length), with labels."""
    ids = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def padded(lengths: Iterable[int], *, width: int | None = None, seed: int = 0) -> Batch:
    """Return rows of these lengths as one batch, padded at the right to the longest or to ``width``."""
    lengths = list(lengths)
    width = max(lengths) if width is None else width
    ids = batch_of(seed, rows=len(lengths), length=width)["input_ids"]
    mask = (torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]).long()
    ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def token_rows(count: int, *, length: int = 12) -> list[dict[str, list[int]]]:
    """Return rows of ids with labels as lists."""
    rows = batch_of(0, rows=count, length=length)["input_ids"].tolist()
    return [{"input_ids": row, "labels": list(row), "attention_mask": [1] * length} for row in rows]


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output."""
    loss: Tensor = output["loss"]
    return loss


def train(
    model: nn.Module,
    optimizer: Any,
    *,
    steps: int = 18,
    batches: Callable[[int], Any] = batch_of,
    compute: Callable[[Any], Tensor] | None = None,
    after: Callable[[int, Tensor], None] | None = None,
    clip: float | None = None,
    **options: Any,
) -> Watch:
    """Train in a plain loop under a watch, and return the watch.

    Args:
        model: The model.
        optimizer: Its optimizer.
        steps: Steps of the loop.
        batches: Makes the batch of a step.
        compute: Makes the loss of a batch; None takes the model's own.
        after: Runs after each update with the step and its loss: where most faults sit.
        clip: Clips the gradient norm there.
        **options: Of ``watch``.
    """
    w: Watch = watch(model, optimizer, **options)
    with contextlib.suppress(*EXPECTED), w:
        for step in range(steps):
            batch = batches(step)
            loss = compute(batch) if compute is not None else loss_of(model(**batch))
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if after is not None:
                after(step, loss)
            w.step(loss=loss, batch=batch)
    return w


def small_trainer(model: Any = None, *, kind: Any = None, folder: str, **settings: Any) -> Any:
    """Return a transformers Trainer over a few rows, quiet and on the CPU."""
    import transformers  # This is a user's own trainer: what train/ passes to the workbench's runs is not needed here.

    settings = {"max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "no", "report_to": [],
                "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, **settings}  # fmt: skip
    arguments = transformers.TrainingArguments(output_dir=folder, **settings)
    return (kind or transformers.Trainer)(model=model or tiny_llama(), args=arguments, train_dataset=token_rows(8))


WORDS = ("how", "are", "you", "I", "am", "fine", "thank", "what", "is", "it", "a", "tree")


def word_tokenizer(*, pad: str = "[PAD]", adds_bos: bool = False) -> Any:
    """Return a tokenizer of whole words; with ``adds_bos`` it begins each text with ``<s>``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["[PAD]", "<s>", "</s>", "[UNK]", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="[UNK]", pad_token=pad
    )


def byte_tokenizer() -> Any:
    """Return a byte-level BPE that merges a newline with what follows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False)
    backend.train_from_iterator([f"question {n}\n### Response: answer {n}" for n in range(50)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def chat_rows() -> list[Mapping[str, Any]]:
    """Return four conversations of two turns."""
    turns = ("how are you", "I am fine", "what is it", "it is a tree")
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    return [{"messages": messages} for _ in range(4)]
