"""Several tasks: rows go through their own adapters, contradictory ones are both learned, each becomes plain LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.components.loss import compute_loss
from workbench.components.model import build_model
from workbench.components.multitask import load_tasks
from workbench.components.optimizer import build_optimizer
from workbench.components.own_adapter import adapter_tensors
from workbench.estimate import estimate_run
from workbench.hardware import find_device
from workbench.train.checkpoint import load_weights, save_weights

from .tiny import CPU, VOCABULARY, recipe_with, tiny_config, tiny_source


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread: threads of tiny products mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TWO = {"tasks.data": ("up=a.jsonl", "down=b.jsonl"), "adapter.r": 4, "training.mixed_precision": "no"}


def build(folder: Path, changes: dict[str, Any] | None = None) -> tuple[Any, Any]:
    recipe = recipe_with({**TWO, **(changes or {})})
    source: Any = tiny_source(folder)
    torch.manual_seed(0)
    return recipe, build_model(recipe, source, CPU, place="cpu")


def rows(seed: int = 0, count: int = 8) -> dict[str, torch.Tensor]:
    """Return prompts to which one task answers token 5 and the other token 9."""
    prompts = torch.randint(0, VOCABULARY, (count, 2), generator=torch.Generator().manual_seed(seed))
    task = torch.arange(count) % 2
    tokens = torch.cat([prompts, torch.where(task == 0, 5, 9)[:, None]], dim=1)
    labels = tokens.clone()
    labels[:, :2] = -100
    return {"input_ids": tokens, "labels": labels, "task": task}


def randomize(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0.0, 0.3, generator=generator)


def logits(model: Any, tokens: torch.Tensor, **extra: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tokens, **extra).logits
    return found


def test_lower_layers_share_and_upper_ones_belong_to_a_task(tmp_path: Path) -> None:
    _, model = build(tmp_path)
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    lower, upper = ([name for name in names if f"layers.{index}." in name] for index in (0, 1))
    assert all(".shared." in name for name in lower)
    assert {".up." in name for name in upper} == {True, False} and not any(".shared." in name for name in upper)
    assert "task_gates.factors" in names and all("lora_" in name for name in names if "gates" not in name)


def test_each_row_is_computed_as_its_task_alone(tmp_path: Path) -> None:
    _, model = build(tmp_path)
    randomize(model)
    batch = rows()
    mixed = logits(model, batch["input_ids"], task=batch["task"])
    for row, task in enumerate(batch["task"].tolist()):
        alone = logits(model, batch["input_ids"][row : row + 1], task=torch.tensor([task]))
        assert torch.allclose(mixed[row], alone[0], atol=1e-5)
    other = logits(model, batch["input_ids"], task=1 - batch["task"])
    assert (mixed - other).abs().amax(dim=(1, 2)).min() > 0.01


def train(folder: Path, changes: dict[str, Any], *, knows_tasks: bool) -> float:
    recipe, model = build(folder, changes)
    # At random the frozen head is so small that no hidden state makes a token likely.
    model.get_output_embeddings().weight.data.mul_(20)
    optimizer = build_optimizer(recipe, model)
    for seed in range(25):
        batch = rows(seed)
        if not knows_tasks:
            batch.pop("task")
        compute_loss(recipe, model, batch, None).backward()
        optimizer.step()
        optimizer.zero_grad()
    batch = rows(99, 32)
    if not knows_tasks:
        batch.pop("task")
    with torch.no_grad():
        return float(compute_loss(recipe, model.eval(), batch, None))


def test_contradictory_tasks_are_both_learned_below_what_one_adapter_reaches(tmp_path: Path) -> None:
    rate = {"training.learning_rate": 5e-2}
    alone = train(tmp_path, {**rate, "tasks.data": (), "adapter.r": 8}, knows_tasks=False)
    together = train(tmp_path, rate, knows_tasks=True)
    # Whoever cannot tell the tasks apart can at best give each answer half of the probability: ln 2.
    assert alone > 0.68 and together < 0.1, (alone, together)


def test_each_task_is_a_plain_lora_adapter_with_its_gates_folded_in(tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    _, model = build(tmp_path / "base")
    randomize(model)
    (tmp_path / "saved").mkdir()
    save_weights(model, tmp_path / "saved")
    plain = load_tasks(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "saved", ["up", "down"])
    tokens = rows()["input_ids"]
    for index, task in enumerate(("up", "down")):
        plain.set_adapter(task)
        expected = logits(model, tokens, task=torch.full((len(tokens),), index))
        assert torch.allclose(logits(plain, tokens), expected, atol=1e-4), task
        alone = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved" / task)
        assert torch.allclose(logits(alone, tokens), expected, atol=1e-4), task


def test_a_checkpoint_restores_adapters_and_gates(tmp_path: Path) -> None:
    _, model = build(tmp_path / "base")
    randomize(model)
    before = {name: one.clone() for name, one in adapter_tensors(model).items()}
    (tmp_path / "saved").mkdir()
    save_weights(model, tmp_path / "saved", for_resume=True)
    _, fresh = build(tmp_path / "base")
    load_weights(fresh, tmp_path / "saved")
    after = adapter_tensors(fresh)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("shared", [0, 1])
def test_the_estimate_counts_every_adapter_and_gate(tmp_path: Path, shared: int) -> None:
    recipe, model = build(tmp_path, {"tasks.shared_layers": shared})
    recipe = recipe.with_changes({"model.config": {**tiny_config().to_dict(), "dtype": "float32"}})
    trains = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert estimate_run(recipe, find_device("Tesla T4")).num_trainable_parameters == trains
