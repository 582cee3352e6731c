"""A whole run of a tiny model without tokenizer and data set on disk, for the tests of this folder."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from workbench.components.model import build_model
from workbench.components.optimizer import build_optimizer, build_schedule
from workbench.components.precision import resolve_precision
from workbench.train.arguments import count_steps
from workbench.train.build import Run

from ..components.tiny import CPU, VOCABULARY, recipe_with, tiny_source


def rows_of(count: int, seed: int = 0, shortest: int = 5, longest: int = 24):
    """Return a data set of ``count`` samples of random tokens and random length; the first third is not learned."""
    from datasets import Dataset

    draw = np.random.default_rng(seed)
    samples = [draw.integers(0, VOCABULARY, int(draw.integers(shortest, longest))).tolist() for _ in range(count)]
    labels = [[-100] * (len(sample) // 3) + sample[len(sample) // 3 :] for sample in samples]
    lengths = [len(sample) for sample in samples]
    return Dataset.from_dict({"input_ids": samples, "labels": labels, "length": lengths})


def collate(samples):
    """Pad to the longest sample; the mask is left out when nothing is padded."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(name, fill):
        return torch.tensor([sample[name] + [fill] * (longest - len(sample[name])) for sample in samples])

    batch = {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}
    mask = torch.tensor(
        [[1] * len(sample["input_ids"]) + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    )
    return batch if bool(mask.all()) else {**batch, "attention_mask": mask}


class Tokenizer:
    """What a session needs of a tokenizer."""

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def small_recipe(**changes):
    """Return a Recipe of six quick steps; keywords are dotted fields with ``__`` for the dot."""
    values = {
        "training.max_steps": 6,
        "training.per_device_train_batch_size": 2,
        "training.gradient_accumulation_steps": 2,
        "training.learning_rate": 1e-2,
        "training.save_steps": 0,
        "evaluation.eval_steps": 0,
        "evaluation.max_rows": 6,
    }
    return recipe_with({**values, **{name.replace("__", "."): value for name, value in changes.items()}})


def build_tiny_run(recipe, folder, *, num_samples: int = 22, precision=None) -> Run:
    """Build what ``build_run`` builds, around a tiny model below ``folder``."""
    from transformers import set_seed

    source = tiny_source(folder)
    set_seed(recipe.training.seed)
    model = build_model(recipe, source, CPU, place="cpu")
    evaluation = None if recipe.evaluation.split == "none" else rows_of(recipe.evaluation.max_rows, seed=9)
    data = SimpleNamespace(train=rows_of(num_samples), evaluation=evaluation, classes=())
    num_steps = count_steps(recipe, num_samples)
    optimizer = build_optimizer(recipe, model)
    return Run(
        recipe=recipe,
        device=CPU,
        source=source,
        tokenizer=Tokenizer(),
        data=data,
        collator=collate,
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(recipe, optimizer, num_steps),
        precision=precision or resolve_precision(recipe, CPU),
        num_steps=num_steps,
    )


class Log:
    """An observer that keeps every event."""

    def __init__(self):
        self.events = []

    def on_event(self, event):
        self.events.append(event)

    def of(self, kind):
        return [event.data for event in self.events if event.kind == kind]

    @property
    def states(self):
        return [data["state"] for data in self.of("state")]
