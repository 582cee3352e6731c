"""Tiny models and batches that the case scripts share: plain user code."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(*, vocab=256, hidden=64, layers=2, seed=0, **settings):
    """Return a random Llama of about 0.1 million parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **settings,
    )
    return LlamaForCausalLM(config)


def batch_of(seed, *, rows=4, length=24, vocab=256):
    """Return random ids with labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def padded(rows):
    """Return rows of different length as one batch, padded at the right."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    labels = torch.where(mask.bool(), ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def lora_config(**settings):
    """Return a small LoRA configuration on the attention's q and v."""
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings})


def tiny_lora(model=None, **settings):
    """Return a tiny Llama with an adapter."""
    from peft import get_peft_model

    return get_peft_model(model or tiny_llama(), lora_config(**settings))


def token_rows(count, *, length=24, seed=0, vocab=256):
    """Return rows of ids with labels as lists."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, vocab, (count, length), generator=generator).tolist()
    return [{"input_ids": row, "labels": list(row), "attention_mask": [1] * len(row)} for row in rows]


def small_trainer(*, model=None, rows=None, metrics=False, reduce=False, hidden_states=False, trainer=None, **settings):
    """Return a transformers Trainer over random rows, quiet and on the CPU."""
    import transformers
    from transformers import Trainer, TrainingArguments

    transformers.logging.set_verbosity_error()
    arguments = TrainingArguments(
        **{
            "output_dir": tempfile.mkdtemp(),
            "per_device_train_batch_size": 1,
            "max_steps": 4,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "logging_steps": 1,
            "dataloader_pin_memory": False,
            **settings,
        }
    )
    model = model or tiny_llama(vocab=2048 if metrics or "eval_strategy" in settings else 256)
    model.config.output_hidden_states = hidden_states
    return (trainer or Trainer)(
        model=model,
        args=arguments,
        train_dataset=rows or token_rows(16),
        eval_dataset=token_rows(64, length=32, seed=1),
        compute_metrics=(lambda prediction, compute_result=True: {"rows": len(prediction.predictions)})
        if metrics
        else None,
        preprocess_logits_for_metrics=(lambda logits, labels: logits.argmax(-1)) if reduce else None,
    )
