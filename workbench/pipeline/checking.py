"""``check``: the pre-flight audit of a Recipe, a Trainer, or a dict of what a run will use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..diagnose.audit import Subject, audit
from ..diagnose.finding import Finding
from ..events import Cancel, ProgressCallback
from ..recipe import Recipe

_KEYS = frozenset(Subject.__dataclass_fields__) - {"notes"}
AUDIT_ROWS = 64


def check(target: Any, *, progress: ProgressCallback | None = None, cancel: Cancel | None = None) -> list[Finding]:
    """Audit a run before it begins.

    Args:
        target: A Recipe; a transformers or TRL ``Trainer``; or a dict with any of ``model``, ``tokenizer``,
            ``dataset``,
            ``optimizer``, ``collator``, ``dataloader``, ``args``, ``eval_dataset``, ``max_length``, ``packing``,
            ``assistant_only_loss``, ``response_template``, ``batch``, ``saved_folder``, ``resumed_step``,
            ``scheduler``, ``loss``, ``accumulation``, ``scaler``.
        progress: Told how far fetching, loading and tokenizing a Recipe's model and data are.
        cancel: Looked at meanwhile.

    Returns:
        One finding per fault; empty when nothing is wrong.

    Raises:
        TypeError: ``target`` is none of these.
        ValueError: The dict holds a name that is not known.
    """
    if isinstance(target, Recipe):
        return audit(_subject_of_recipe(target, progress, cancel)) + _of_precision(target)
    if isinstance(target, Mapping):
        unknown = sorted(set(target) - _KEYS)
        if unknown:
            raise ValueError(f"check() got {unknown[0]!r}; allowed are {', '.join(sorted(_KEYS))}.")
        return audit(Subject(**target))
    if hasattr(target, "train_dataset") and hasattr(target, "data_collator"):
        return audit(_subject_of_trainer(target))
    raise TypeError(
        f"check() got {type(target).__name__}. Give it a Recipe, a Trainer, or a dict with model, tokenizer, dataset "
        "and optimizer."
    )


def _of_precision(recipe: Recipe) -> list[Finding]:
    """Find bfloat16 on a CPU that has no units for it; of a GPU the rules of the Recipe say so."""
    from ..components.model import resolve_precision
    from ..diagnose.speed import emulated_bf16
    from ..hardware import target_device

    device = target_device(recipe)
    precision = resolve_precision(recipe, device)
    is_bf16 = "bfloat16" in (str(precision.autocast_dtype).removeprefix("torch."), recipe.model.dtype)
    return [emulated_bf16(device.name)] if device.kind == "cpu" and not device.bf16_native and is_bf16 else []


def _subject_of_trainer(trainer: Any) -> Subject:
    evaluation = trainer.eval_dataset
    return Subject(
        model=trainer.model,
        tokenizer=getattr(trainer, "processing_class", None),
        dataset=trainer.train_dataset,
        optimizer=trainer.optimizer,
        collator=trainer.data_collator,
        args=trainer.args,
        eval_dataset=next(iter(evaluation.values()), None) if isinstance(evaluation, dict) else evaluation,
        compute_metrics=trainer.compute_metrics is not None,
        reduces_logits=getattr(trainer, "preprocess_logits_for_metrics", None) is not None,
        max_length=getattr(trainer.args, "max_length", None),
        packing=bool(getattr(trainer.args, "packing", False)),
        scheduler=trainer.lr_scheduler,
        loss=lambda batch, count: _loss_of_trainer(trainer, batch, count),
        accumulation=int(getattr(trainer.args, "gradient_accumulation_steps", 1)),
    )


def _loss_of_trainer(trainer: Any, batch: Mapping[str, Any], count: int) -> Any:
    """Return the loss as the trainer's own step computes it."""
    with trainer.compute_loss_context_manager():
        return trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count)


def _subject_of_recipe(recipe: Recipe, progress: ProgressCallback | None, cancel: Cancel | None) -> Subject:
    """Build model, data and optimizer of a Recipe as its run would, on few rows, and audit those."""
    from ..components.data import build_collator, prepare_data
    from ..components.loss import compute_loss
    from ..components.model import build_model
    from ..components.optimizer import build_optimizer
    from ..components.source import find_source, load_tokenizer
    from ..hardware import target_device

    data = recipe.data.model_copy(update={"max_rows": min(recipe.data.max_rows or AUDIT_ROWS, AUDIT_ROWS)})
    small = recipe.model_copy(update={"data": data})
    source = find_source(small, for_training=True, progress=progress, cancel=cancel)
    tokenizer = load_tokenizer(source)
    prepared = prepare_data(small, tokenizer, progress=progress, cancel=cancel)
    device = target_device(small)
    model = build_model(small, source, device, place="cpu", progress=progress, cancel=cancel)
    return Subject(
        model=model,
        tokenizer=tokenizer,
        dataset=prepared.train,
        optimizer=build_optimizer(small, model),
        collator=build_collator(small, tokenizer),
        max_length=recipe.data.max_length,
        packing=recipe.data.packing,
        loss=lambda batch, count: compute_loss(recipe, model, batch, count),
        accumulation=recipe.training.gradient_accumulation_steps,
    )
