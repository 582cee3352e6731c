"""Which settings decide a model's modules, and which a trace: the keys that both are cached under.

What is not listed here counts, so that a new field of the Recipe never finds the trace of another.
"""

from __future__ import annotations

import json
from typing import Any

from ..hardware import Device
from ..recipe import Recipe

# Fields that change neither the graph nor the storages.
_IRRELEVANT = (
    "data.name_or_path", "data.config_name", "data.split", "data.max_rows", "data.format", "data.messages_column",
    "data.prompt_column", "data.completion_column", "data.text_column", "data.train_on", "data.padding",
    "data.max_length", "data.group_by_length", "data.sampling", "data.num_proc", "data.dataloader_num_workers",
    "adapter.lora_alpha",
    "training.per_device_train_batch_size", "training.gradient_accumulation_steps", "training.learning_rate",
    "phases.steps", "phases.learning_rate", "pruning.amount", "pruning.step",
    "training.num_train_epochs", "training.max_steps", "training.lr_scheduler_type", "training.warmup_steps",
    "training.adam_beta1", "training.adam_beta2", "training.adam_epsilon", "training.tf32", "training.seed",
    "training.logging_steps", "training.save_steps", "training.save_total_limit", "training.report_to",
    "training.upload_to", "training.torch_compile", "training.torch_compile_mode",
    "evaluation.split", "evaluation.max_rows", "evaluation.eval_steps", "evaluation.early_stopping_patience",
    "evaluation.load_best_model_at_end", "evaluation.per_device_eval_batch_size", "hardware.device",
    "hardware.emulate", "hardware.torch_version", "hardware.expandable_segments", "cost.price_per_hour_usd",
    "policies.on_nonfinite", "policies.on_spike", "policies.spike_factor",
    "sharding.num_processes", "sharding.num_machines", "sharding.layout",
    "sharding.tensor_parallel_size", "sharding.pipeline_parallel_size", "sharding.network", "sharding.machine_network",
    "sharding.bucket_cap_mb", "sharding.timeout_s",
)  # fmt: skip
# Of the rest, those that change a trace but not the modules it runs.
_TRACE_ONLY = (
    "training.optim",
    "training.max_grad_norm",
    "training.loss_type",
    "training.weight_decay",
    "data.packing",
)


def cache_key(recipe: Recipe, device: Device, *, for_model: bool) -> str:
    """Return what decides the modules, or the trace.

    Args:
        recipe: The settings.
        device: The target.
        for_model: Leave out what only the trace depends on.
    """
    values = recipe.to_dict()
    left_out = [*_IRRELEVANT, *_TRACE_ONLY] if for_model else _IRRELEVANT
    for path in left_out:
        group, name = path.split(".")
        values[group].pop(name, None)
    _drop_idle(values)
    facts: list[Any] = [device.has_caching_allocator, device.compute_capability, device.bf16_native]
    if recipe.quantization.load_in_4bit:
        facts.append(device.sm_count)  # it decides which products unpack the weight
    return json.dumps([values, facts], sort_keys=True, default=str)


def _drop_idle(values: dict[str, dict[str, Any]]) -> None:
    """Take out what has no effect while its switch is off, so that it does not look like another model."""
    quantization = values["quantization"]
    if not quantization["load_in_4bit"]:
        for name in [name for name in quantization if name.startswith("bnb_4bit")]:
            del quantization[name]
        if not quantization["load_in_8bit"]:
            values["quantization"] = {}
    if values["adapter"]["method"] == "none":
        kept = ("method", "trainable_layers", "trainable_modules")
        values["adapter"] = {name: values["adapter"][name] for name in kept}
    elif values["adapter"]["method"] == "lora":
        del values["adapter"]["bottleneck_size"]
    else:
        for name in ("r", "lora_dropout", "use_rslora", "use_dora", "target_modules"):
            del values["adapter"][name]
