"""The Recipe as transformers' TrainingArguments. The only file that names them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ..errors import MissingPackageError
from ..hardware import Device
from ..recipe import Recipe

_TRACKER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def training_arguments(recipe: Recipe, device: Device, run_dir: Path, *, has_experts: bool = False) -> Any:
    """Return the TrainingArguments of a run.

    Precision, checkpointing, optimizer, evaluation and saving are off here on purpose: ``components/`` and the engine
    do them, so that the estimate and the run share the code. What stays is the trainer's loop and its trackers.

    Raises:
        MissingPackageError: A tracker of ``report_to`` is not installed.
    """
    from transformers import TrainingArguments

    training, data = recipe.training, recipe.data
    for tracker in training.report_to:
        if importlib.util.find_spec(_TRACKER_PACKAGES[tracker]) is None:
            extra = "report" if tracker == "tensorboard" else None
            raise MissingPackageError(_TRACKER_PACKAGES[tracker], f"training.report_to={tracker}", extra)
    # Where steps differ in size, the engine itself fetches their micro-batches; the trainer sees one batch a step.
    accumulation = 1 if recipe.policies.batch == "noise_scale" else training.gradient_accumulation_steps
    on_gpu = device.has_caching_allocator
    arguments = TrainingArguments(
        output_dir=str(run_dir),
        run_name=run_dir.name,
        per_device_train_batch_size=training.per_device_train_batch_size,
        per_device_eval_batch_size=recipe.evaluation.per_device_eval_batch_size,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=training.num_train_epochs,
        max_steps=sum(recipe.phases.steps) or (training.max_steps if training.max_steps > 0 else -1),
        learning_rate=training.learning_rate,
        max_grad_norm=training.max_grad_norm,
        seed=training.seed,
        use_cpu=not on_gpu,
        ddp_backend="gloo" if recipe.sharding.num_processes > 1 and not on_gpu else None,
        ddp_bucket_cap_mb=recipe.sharding.bucket_cap_mb,
        # What is adapted takes part in every step; only experts that saw no token stay without a gradient.
        ddp_find_unused_parameters=has_experts,
        logging_strategy="steps" if training.report_to else "no",
        logging_steps=training.logging_steps,
        logging_nan_inf_filter=False,  # It prints a NaN loss as 0.0.
        report_to=list(training.report_to) or "none",
        disable_tqdm=True,
        eval_strategy="no",
        save_strategy="no",
        dataloader_num_workers=data.dataloader_num_workers,
        dataloader_persistent_workers=data.dataloader_num_workers > 0,
        dataloader_pin_memory=on_gpu,
        remove_unused_columns=False,  # The collator picks the columns it needs.
        use_cache=False,
        push_to_hub=False,
    )
    # With several visible GPUs and no launcher the trainer would wrap the model in DataParallel without a word.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def count_steps(recipe: Recipe, num_samples: int) -> int:
    """Return the optimizer steps of a run over ``num_samples`` training samples, as the trainer counts them."""
    training = recipe.training
    if recipe.phases.steps:
        return sum(recipe.phases.steps)
    if training.max_steps > 0:
        return training.max_steps
    num_batches = -(-num_samples // (training.per_device_train_batch_size * recipe.sharding.num_processes))
    steps_per_epoch = max(-(-num_batches // training.gradient_accumulation_steps), 1)
    return -int(-(training.num_train_epochs * steps_per_epoch) // 1)
