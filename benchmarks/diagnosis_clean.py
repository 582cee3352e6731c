"""Healthy runs of 60 steps in different configurations: the doctors must stay silent on each."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

STEPS = 60


@dataclass(frozen=True)
class Clean:
    """One healthy configuration.

    Attributes:
        model: ``"llama"``, ``"lora"``, ``"eager"``, ``"tied"``, ``"checkpointed"``, ``"bf16"``, ``"dropout"`` or
            ``"mlp"``.
        optimizer: ``"adamw"``, ``"sgd"``, ``"momentum"``, ``"adagrad"``, ``"rmsprop"``, ``"adafactor"``.
        lengths: ``"fixed"``, ``"varied"``, ``"sorted"``, ``"rare"``.
        accumulation: Micro-batches per step.
        keeps: What the loop keeps, harmlessly.
        look: Passed to ``watch``.
    """

    model: str = "llama"
    optimizer: str = "adamw"
    lengths: str = "fixed"
    accumulation: int = 1
    keeps: str = "nothing"
    clip: bool = True
    set_to_none: bool = True
    evaluate_every: int = 0
    schedule: bool = False
    look: str = "auto"


CONFIGURATIONS: dict[str, Clean] = {
    "plain": Clean(),
    "plain, looked at": Clean(look="now"),
    "sgd": Clean(optimizer="sgd"),
    "momentum without clipping": Clean(optimizer="momentum", clip=False),
    "adagrad": Clean(optimizer="adagrad"),
    "rmsprop, gradients zeroed": Clean(optimizer="rmsprop", set_to_none=False),
    "adafactor": Clean(optimizer="adafactor"),
    "varied lengths": Clean(lengths="varied"),
    "varied lengths, looked at": Clean(lengths="varied", look="now"),
    "sorted by length": Clean(lengths="sorted"),
    "sorted by length, looked at": Clean(lengths="sorted", look="now"),
    "rare long batches": Clean(lengths="rare"),
    "lora": Clean(model="lora"),
    "lora, looked at": Clean(model="lora", look="now"),
    "lora, varied lengths": Clean(model="lora", lengths="varied"),
    "lora, schedule": Clean(model="lora", schedule=True),
    "eager attention": Clean(model="eager"),
    "tied weights": Clean(model="tied"),
    "checkpointing": Clean(model="checkpointed"),
    "checkpointing, looked at": Clean(model="checkpointed", look="now"),
    "bf16 weights": Clean(model="bf16", optimizer="sgd"),
    "dropout": Clean(model="dropout"),
    "dropout, looked at": Clean(model="dropout", look="now"),
    "classifier": Clean(model="mlp"),
    "accumulation by tokens": Clean(accumulation=3, lengths="varied"),
    "accumulation of equal parts": Clean(accumulation=2),
    "float total": Clean(keeps="float total"),
    "detached total": Clean(keeps="detached total"),
    "list of floats": Clean(keeps="floats"),
    "bounded deque of logits": Clean(keeps="deque", look="now"),
    "last outputs": Clean(keeps="last", look="now"),
    "moving average of weights": Clean(keeps="ema"),
    "detached carry": Clean(keeps="carry", look="now"),
    "evaluation every 10": Clean(evaluate_every=10),
    "evaluation, looked at": Clean(evaluate_every=6, look="now"),
    "best weights kept": Clean(keeps="best", evaluate_every=10),
    "list that is cut": Clean(keeps="cut list", look="now"),
}


def run_configuration(settings: Clean) -> Any:
    """Run one configuration and return its watch."""
    import torch

    import workbench

    model, optimizer = _model(settings), None
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(settings.optimizer, trained)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS) if settings.schedule else None
    draw, kept = random.Random(0), _Kept(settings.keeps, model)
    with workbench.watch(model, optimizer, scheduler=scheduler, look=settings.look) as w:
        for step in range(STEPS):
            batches = [_batch(settings, step, draw) for _ in range(settings.accumulation)]
            total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
            for batch in batches:
                loss, output = _loss(settings, model, batch, total)
                loss.backward()
                kept.take(loss, output)
            if settings.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad(set_to_none=settings.set_to_none)
            if settings.evaluate_every and step % settings.evaluate_every == settings.evaluate_every - 1:
                _evaluate(settings, model, draw)
                kept.evaluated()
            w.step(loss=loss, batch=batch)
    return w


def _model(settings: Clean) -> Any:
    import torch
    from tiny import tiny_llama, tiny_lora

    if settings.model == "mlp":
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 64), torch.nn.GELU(),
                                   torch.nn.Linear(64, 256))  # fmt: skip
    if settings.model == "lora":
        return tiny_lora()
    extra = {
        "eager": {"attn_implementation": "eager"},
        "tied": {"tie_word_embeddings": True},
        "dropout": {"attention_dropout": 0.2},
    }.get(settings.model, {})
    model = tiny_llama(**extra)
    if settings.model == "checkpointed":
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model.to(torch.bfloat16) if settings.model == "bf16" else model


def _optimizer(name: str, trained: list[Any]) -> Any:
    import torch

    if name == "adafactor":
        return torch.optim.Adafactor(trained, lr=1e-3)
    kinds = {
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "momentum": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
    }
    return kinds[name](trained, lr=1e-3, **({"momentum": 0.9} if name == "momentum" else {}))


def _batch(settings: Clean, step: int, draw: random.Random) -> dict[str, Any]:
    from tiny import batch_of

    length = {
        "fixed": lambda: 24,
        "varied": lambda: draw.randint(8, 60),
        "sorted": lambda: 8 + step,
        "rare": lambda: 90 if step % 17 == 16 else 16,
    }[settings.lengths]()
    return batch_of(draw.randrange(10_000), length=length)


def _loss(settings: Clean, model: Any, batch: dict[str, Any], total: int) -> tuple[Any, Any]:
    import torch

    if settings.model == "mlp":
        logits = model(batch["input_ids"])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), logits
    extra = {"num_items_in_batch": torch.tensor(total)} if settings.accumulation > 1 else {}
    output = model(**batch, **extra)
    return output.loss, output.logits


def _evaluate(settings: Clean, model: Any, draw: random.Random) -> None:
    import torch

    model.eval()
    with torch.no_grad():
        logits = [_loss(settings, model, _batch(settings, 0, draw), 1)[1].argmax(-1) for _ in range(3)]
    model.train()
    del logits


class _Kept:
    """What a healthy loop may keep."""

    def __init__(self, kind: str, model: Any) -> None:
        self.kind, self.model = kind, model
        self.total: Any = 0.0
        self.values: list[Any] = []
        self.recent: deque[Any] = deque(maxlen=40)
        self.weights = {name: value.clone() for name, value in model.state_dict().items()} if kind == "ema" else {}

    def take(self, loss: Any, output: Any) -> None:
        """Keep what this kind keeps of one micro-step."""
        if self.kind == "float total":
            self.total += loss.item()
        elif self.kind == "detached total":
            self.total = self.total + loss.detach()
        elif self.kind == "floats":
            self.values.append(float(loss))
        elif self.kind == "deque":
            self.recent.append(output.detach())
        elif self.kind == "last":
            self.total = output.detach()
        elif self.kind == "carry":
            self.total = 0.5 * self.total + output.detach().mean()
        elif self.kind == "cut list":
            self.values.append(output.detach())
            self.values = self.values[-16:]
        elif self.kind == "ema":
            for name, value in self.model.state_dict().items():
                self.weights[name].mul_(0.99).add_(value, alpha=0.01)

    def evaluated(self) -> None:
        """Keep the best weights."""
        if self.kind == "best":
            self.weights = copy.deepcopy(self.model.state_dict())


def main() -> int:
    """Run all of them in this process and print what was said."""
    from benchmarks.diagnosis import FOLDER

    sys.path.insert(0, str(FOLDER))
    alarms = 0
    for name, settings in CONFIGURATIONS.items():
        watch = run_configuration(settings)
        alarms += bool(watch.findings)
        print(
            f"{name:32} {watch.memory_verdict.cause if watch.memory_verdict else 'not suspected':24}", *watch.findings
        )
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
