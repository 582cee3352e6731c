"""What a task decides: the class of the model, the configs it takes, the head it trains, the labels it knows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..recipe import Recipe

if TYPE_CHECKING:
    from .source import ModelSource

CAUSAL = "causal-lm"
CLASSIFICATION = "sequence-classification"
IMAGE_TEXT = "image-text-to-text"
SEQ2SEQ = "seq2seq-lm"

# Names of the head that a classifier trains beside its adapter, by convention of transformers.
HEAD_NAMES = ("score", "classifier", "classification_head", "sequence_summary", "logits_proj", "pre_classifier")


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: As the Recipe spells it.
        auto_class: transformers' class that builds the model.
        mapping: transformers' mapping from configs to classes.
        peft_type: PEFT's name of the task.
        models: The models it takes, in words.
        shifts_labels: Whether a token is predicted from the ones before it, so that a row's first label is never used.
    """

    name: str
    auto_class: str
    mapping: str
    peft_type: str
    models: str
    shifts_labels: bool = True


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(CAUSAL, "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", "CAUSAL_LM", "causal language models"),
        Task(
            CLASSIFICATION,
            "AutoModelForSequenceClassification",
            "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
            "SEQ_CLS",
            "models with a classification head",
            shifts_labels=False,
        ),
        Task(
            IMAGE_TEXT,
            "AutoModelForImageTextToText",
            "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
            "CAUSAL_LM",
            "models of images and text",
        ),
        Task(
            SEQ2SEQ,
            "AutoModelForSeq2SeqLM",
            "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
            "SEQ_2_SEQ_LM",
            "encoder-decoder models",
            shifts_labels=False,
        ),
    )
}


def task_of(recipe: Recipe) -> Task:
    """Return the task of ``recipe``."""
    return TASKS[recipe.model.task]


def auto_class(recipe: Recipe) -> Any:
    """Return the transformers class that builds the model."""
    import transformers

    return getattr(transformers, task_of(recipe).auto_class)


def model_class(task: str, config: Any) -> Any | None:
    """Return the class that transformers has for ``config`` in a task, or None where it has none."""
    import transformers

    mapping = getattr(transformers, TASKS[task].mapping)
    return mapping.get(type(config), None)  # a lazy mapping, whose get needs a default


def tasks_of(config: Any) -> list[str]:
    """Return the tasks that transformers has a class for, for messages."""
    return [name for name in TASKS if model_class(name, config) is not None]


def head_modules(model: nn.Module) -> list[str]:
    """Return the names of the children that make up a classification head."""
    return [name for name, _ in model.named_children() if name in HEAD_NAMES]


def own_labels(config: Any) -> tuple[str, ...]:
    """Return the classes that a fine-tuned classifier already knows, in order; empty where they are placeholders."""
    names = [str(name) for _, name in sorted((config.id2label or {}).items(), key=lambda item: int(item[0]))]
    return () if all(name.startswith("LABEL_") for name in names) else tuple(names)


def with_classes(
    recipe: Recipe, source: ModelSource, labels: Sequence[str] = (), pad_token_id: int | None = None
) -> ModelSource:
    """Return a source whose config holds what a classifier needs to know.

    Args:
        recipe: ``model.num_labels`` decides the width of the head where it is set.
        source: Where the model comes from.
        labels: Names of the classes of the data, in order; empty where they are not known yet.
        pad_token_id: Id that fills up; decoders find a row's last token by it.
    """
    if recipe.model.task != CLASSIFICATION:
        return source
    config = copy.deepcopy(source.config)
    wanted = max(recipe.model.num_labels or 0, len(labels)) or len(config.id2label or ()) or 2
    if labels:
        names = [*labels, *(f"LABEL_{index}" for index in range(len(labels), wanted))]
        config.id2label = dict(enumerate(names))
        config.label2id = {name: index for index, name in enumerate(names)}
    elif len(config.id2label or ()) != wanted:
        config.num_labels = wanted
    config.problem_type = "single_label_classification"
    text = config.get_text_config()  # Of a model of images and text a part, which the head asks.
    for part in (config, text):
        if pad_token_id is not None:
            part.pad_token_id = pad_token_id
        elif getattr(part, "pad_token_id", None) is None:
            eos = getattr(part, "eos_token_id", None)
            rows = getattr(text, "vocab_size", None) or 0
            part.pad_token_id = eos if isinstance(eos, int) and 0 <= eos < rows else 0
    return dataclasses.replace(source, config=config)
