"""Five steps of the workbench's own micro-step, for one process or a rank of several."""

import torch
from torch import distributed

from workbench.components.collator import build_collator
from workbench.components.data import prepare_data
from workbench.components.model import build_model
from workbench.components.optimizer import build_optimizer
from workbench.components.precision import resolve_precision
from workbench.components.source import find_source, load_tokenizer
from workbench.components.step import micro_step
from workbench.hardware import read_device
from workbench.recipe import Recipe

MICRO_BATCHES, BATCH, STEPS = 4, 2, 5


def build():
    """Return the recipe, the model in float32 on the CPU, the samples and the collator."""
    recipe = Recipe().with_changes(
        {
            "model.name_or_path": "tiny-llama",
            "adapter.method": "none",
            "data.max_length": 64,
            "data.max_rows": 100,
            "training.optim": "adamw_torch",
            "hardware.device": "cpu",
        }
    )
    source = find_source(recipe, for_training=True)
    tokenizer = load_tokenizer(source)
    data = prepare_data(recipe, tokenizer)
    model = build_model(recipe, source, read_device("cpu"), place="cpu")
    return recipe, model, data.train, build_collator(recipe, tokenizer)


def train(recipe, model, data, collate, *, rank: int = 0, size: int = 1) -> list[float]:
    """Train; micro-batch ``m`` of a step belongs to rank ``m % size``. Returns the mean loss of each step."""
    precision = resolve_precision(recipe, read_device("cpu"))
    optimizer = build_optimizer(recipe, model)
    losses = []
    for step in range(STEPS):
        first = step * MICRO_BATCHES * BATCH
        starts = range(first, first + MICRO_BATCHES * BATCH, BATCH)
        batches = [collate([data[index] for index in range(start, start + BATCH)]) for start in starts]
        num_items = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in batches)
        # Gradients are averaged over the ranks, so that each divides by a mean rank's tokens.
        mine = [micro_step(recipe, model, batch, num_items / size, precision) for batch in batches[rank::size]]
        loss = torch.stack(mine).sum() / size
        if size > 1:
            distributed.all_reduce(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses
