"""What is audited, and the list of audits that run on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..finding import Finding

SAMPLE_ROWS = 48


@dataclass
class Subject:
    """Whatever is known of a run to come; anything may be missing.

    Attributes:
        model: The model as it will train.
        tokenizer: Its tokenizer.
        dataset: Training rows; with ``input_ids`` once tokenised.
        optimizer: The optimizer.
        collator: Turns a list of rows into a batch.
        dataloader: Instead of data set and collator.
        args: Training arguments, read by attribute.
        eval_dataset: Rows of the evaluation.
        compute_metrics: Whether metrics are computed from logits.
        reduces_logits: Whether ``preprocess_logits_for_metrics`` is given.
        max_length: Longest row allowed.
        packing: Rows are packed.
        assistant_only_loss: Only assistant turns are to be learned.
        response_template: Text or ids that mark where the answer begins.
        batch: A batch as the model will get it.
        saved_folder: Where something was saved.
        resumed_step: Step that the run continues from.
        scheduler: The learning-rate schedule.
        loss: Returns the loss of a batch as the loop computes it, for the supervised tokens of the whole step; given
            to see whether accumulated micro-batches add up to the large batch.
        accumulation: Micro-batches of one optimizer step.
        scaler: The loop's own gradient scaler, beside what ``args`` and the trainer bring.
    """

    model: nn.Module | None = None
    tokenizer: Any = None
    dataset: Any = None
    optimizer: Any = None
    collator: Any = None
    dataloader: Any = None
    args: Any = None
    eval_dataset: Any = None
    compute_metrics: bool = False
    reduces_logits: bool = False
    max_length: int | None = None
    packing: bool = False
    assistant_only_loss: bool = False
    response_template: Any = None
    batch: Mapping[str, Any] | None = None
    saved_folder: Any = None
    resumed_step: int | None = None
    scheduler: Any = None
    loss: Callable[[Mapping[str, Tensor], int], Tensor] | None = None
    accumulation: int = 1
    scaler: Any = None
    notes: list[str] = field(default_factory=list)

    @functools.cached_property
    def rows(self) -> list[Mapping[str, Any]]:
        """The first rows of the data set, as mappings; empty when there are none."""
        source = self.dataset if self.dataset is not None else getattr(self.dataloader, "dataset", None)
        if source is None:
            return []
        found = []
        try:
            for index in range(min(SAMPLE_ROWS, len(source))):
                row = source[index]
                if not isinstance(row, Mapping):
                    return []
                found.append(row)
        except (TypeError, KeyError, IndexError):
            return found
        return found

    @functools.cached_property
    def token_rows(self) -> list[list[int]]:
        """Token ids of the sampled rows, padding removed where a mask says so."""
        found = []
        for row in self.rows:
            if "input_ids" not in row:
                return []
            ids, mask = as_list(row["input_ids"]), row.get("attention_mask")
            found.append([i for i, m in zip(ids, as_list(mask), strict=True) if m] if mask is not None else ids)
        return found

    @functools.cached_property
    def collated(self) -> Mapping[str, Tensor]:
        """The batch of the sampled rows as the model will get it; empty when it cannot be made."""
        if self.batch is not None:
            return self.batch
        collate = self.collator or getattr(self.dataloader, "collate_fn", None)
        if not self.rows or "input_ids" not in self.rows[0]:
            return {}
        if collate is not None and (self.collator is not None or self.dataset is None):
            try:
                return dict(collate([dict(row) for row in self.rows]))
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                self.notes.append(f"The collator did not take the rows: {error}")
                return {}
        return _pad(self.rows)

    @property
    def embedding(self) -> Tensor | None:
        """The weight of the input embedding."""
        getter = getattr(self.model, "get_input_embeddings", None)
        try:
            layer = getter() if getter is not None else None
        except (NotImplementedError, AttributeError):
            return None
        layer = original_module(layer)
        weight = getattr(layer, "weight", None)
        return weight if isinstance(weight, Tensor) and weight.device.type != "meta" else None


def original_module(layer: Any) -> Any:
    """Return the trained copy inside PEFT's wrapper of modules trained whole, else the layer."""
    saved = getattr(layer, "modules_to_save", None)
    if isinstance(saved, nn.ModuleDict) and len(saved):
        return next(iter(saved.values()))
    return layer


def as_list(values: Any) -> list[Any]:
    """Return a plain list from a list, a tensor or an array."""
    return list(values.tolist()) if hasattr(values, "tolist") else list(values)


def _pad(rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    width = max(len(as_list(row["input_ids"])) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    has_labels = "labels" in rows[0]
    for index, row in enumerate(rows):
        values = as_list(row["input_ids"])
        ids[index, : len(values)] = torch.tensor(values)
        own = row.get("attention_mask")
        mask[index, : len(values)] = torch.tensor(as_list(own)) if own is not None else 1
        if has_labels:
            labels[index, : len(values)] = torch.tensor(as_list(row["labels"]))
    return {"input_ids": ids, "attention_mask": mask} | ({"labels": labels} if has_labels else {})


Audit = Callable[[Subject], "Finding | None"]
AUDITS: list[Audit] = []
"""Every audit, in the order they run."""


def register(function: Audit) -> Audit:
    """Add an audit to the list."""
    AUDITS.append(function)
    return function


def audit(subject: Subject) -> list[Finding]:
    """Run every audit and return the faults."""
    from . import data, equivalence, evaluation, gradients, model, run  # noqa: F401  # each registers its audits

    found = [check(subject) for check in AUDITS]
    return [finding for finding in found if finding is not None]
