"""transformers' own page of January 2022: BERT-large as a classifier on random tokens, HF's Trainer on a V100.

The page gives the memory NVML shows for the card, of which 1343 MiB were there after the first CUDA operation: CUDA
11.2 loads every kernel at once, which no torch of today does. What is graded is the rest, the reserved bytes.
"""

from __future__ import annotations

from workbench.recipe import Recipe

from . import scripts
from .row import MappedRow, Reading, Row, full_batch, readings_of

# config.json of google-bert/bert-large-uncased.
BERT_LARGE = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "layer_norm_eps": 1e-12,
    "dtype": "float32",
    # The Recipe takes causal models only; the script's classifier attends both ways again.
    "is_decoder": True,
}
_OPTIMIZERS = {"adafactor": "adafactor", "bitsandbytes Adam8bit": "adamw_bnb_8bit"}


def map_row(row: Row) -> MappedRow:
    """Return the row as a Recipe over an inline config; the script puts the classifier in place of the head."""
    steps = 512 / (row["micro_batch_size"] * row["grad_accum"])
    recipe = Recipe.from_dict(
        {
            "model": {"config": BERT_LARGE, "dtype": "float32", "attn_implementation": "eager"},
            "data": {"max_length": row["seq_len"]},
            "adapter": {"method": "none"},
            "training": {
                "per_device_train_batch_size": row["micro_batch_size"],
                "gradient_accumulation_steps": row["grad_accum"],
                "optim": _OPTIMIZERS.get(row["optimizer"], "adamw_torch"),
                "learning_rate": 5e-5,
                "mixed_precision": "fp16" if row["compute_dtype"].startswith("fp16") else "no",
                "gradient_checkpointing": row["gradient_checkpointing"] != "none",
            },
            "evaluation": {"split": "none"},
            "hardware": {"torch_version": "1.10.0"},
        }
    )
    return MappedRow(
        row=row,
        recipe=recipe,
        shape=full_batch(row),
        device="Tesla V100-16GB",
        script=scripts.bert(row),
        readings=_reserved(readings_of(row)),
        step_s=float(row["speed"]["total_time_s"]) / steps,
        differences=("torch 1.10 with kernels loaded eagerly, and a card that other processes may use",),
    )


def _reserved(readings: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """Return what torch had reserved: the whole reading without the context that the page read first."""
    by_counter = {reading.counter: reading.num_bytes for reading in readings}
    return (Reading("reserved", by_counter["process"] - by_counter["context"]),)
