"""Faults that make a value NaN or Inf."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from ...diagnose.finding import Finding
from ...diagnose.run import diagnose_run
from ...events import Event
from ...observe.history import History
from ..watching import Watch, watch
from .library import fault
from .parts import TinyModel, adam, batch_of, loss_of, sgd, small_trainer, tiny_lora, train

STEPS = 5
BAD_STEP = 3


class _Attention(nn.Module):
    """One head of attention; the masks are the caller's."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = torch.bmm(self.q_proj(x), self.k_proj(x).transpose(1, 2)) / 4
        return (scores if mask is None else scores + mask).softmax(-1) @ self.v_proj(x)


def _squares(model: nn.Module) -> Any:
    def compute(batch: Any) -> Tensor:
        found: Tensor = model(batch).float().square().mean()
        return found

    return compute


def _normal(step: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 16)), generator=torch.Generator().manual_seed(step))


@fault("nonfinite.fp16_overflow")
def half_overflows(healthy: bool) -> Watch:
    """A layer whose product goes beyond 65504."""
    dtype = torch.bfloat16 if healthy else torch.float16
    first, second = nn.Linear(16, 16), nn.Linear(16, 4)
    with torch.no_grad():
        first.weight.mul_(3e3)
        second.weight.mul_(3e3)
    model = nn.Sequential(first, second).to(dtype)
    return train(model, sgd(model, 1e-9), steps=3, batches=lambda step: _normal(step).to(dtype),
                 compute=lambda x: model(x).float().mean())  # fmt: skip


@fault("nonfinite.fp16_attention")
def half_scores_overflow(healthy: bool) -> Watch:
    """Attention scores beyond 65504."""
    dtype = torch.bfloat16 if healthy else torch.float16
    attention = _Attention()
    with torch.no_grad():
        attention.q_proj.weight.mul_(1000)
        attention.k_proj.weight.mul_(1000)
    model = nn.ModuleDict({"attention": attention}).to(dtype)
    return train(model, sgd(model, 1e-9), steps=3, batches=lambda step: _normal(step, 2, 6, 16).to(dtype),
                 compute=lambda x: attention(x).float().mean())  # fmt: skip


@fault("nonfinite.fp16_log_probs")
def half_log_probabilities(healthy: bool) -> Watch:
    """Log-probabilities of float16 logits."""
    model = nn.Linear(8, 16).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(0)
        model.bias.copy_(torch.linspace(-60000, 60000, 16))

    def compute(x: Tensor) -> Tensor:
        logits = model(x).float() if healthy else model(x).half()
        return -(torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum(-1).mean()

    return train(model, sgd(model), steps=2, batches=lambda step: _normal(step, 4, 8).to(torch.bfloat16),
                 compute=compute)  # fmt: skip


class _Amplify(torch.autograd.Function):
    """Passes on what comes, and multiplies what goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1e5 * 1e5


@fault("nonfinite.backward_overflow")
def gradient_overflows(healthy: bool) -> Watch:
    """A small forward whose gradient goes beyond 65504."""
    first, second = nn.Linear(16, 16), nn.Linear(16, 4)
    model = nn.ModuleList([first, second]).half()

    def compute(x: Tensor) -> Tensor:
        apply: Any = _Amplify.apply
        states = first(x)
        found: Tensor = second(states if healthy else apply(states)).float().square().mean()
        return found

    return train(model, sgd(model), steps=2, batches=lambda step: _normal(step).half(), compute=compute)


@fault("nonfinite.backward_singular")
def root_of_zero(healthy: bool) -> Watch:
    """The distance of two equal rows: its root is 0, its derivative is not finite."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))

    def pairs(step: int) -> dict[str, Tensor]:
        left, right = _normal(step), _normal(100 + step)
        if step == BAD_STEP:
            right[2] = left[2]
        return {"left": left, "right": right}

    def compute(batch: Any) -> Tensor:
        squares = ((model(batch["left"]) - model(batch["right"])) ** 2).sum(-1)
        return torch.relu(2.0 - ((squares + 1e-8) if healthy else squares).sqrt()).mean()

    return train(model, adam(model), steps=STEPS, batches=pairs, compute=compute)


@fault("nonfinite.log_of_zero")
def log_of_a_probability(healthy: bool) -> Watch:
    """The logarithm of a sigmoid that underflowed."""
    model = nn.Linear(4, 1, bias=False)

    def batches(step: int) -> Tensor:
        x = torch.ones(4, 4)
        if step == BAD_STEP:
            x[2] = -500 * torch.sign(model.weight.detach()[0])
        return x

    def compute(x: Tensor) -> Tensor:
        margin = model(x)
        return -(nn.functional.logsigmoid(margin) if healthy else torch.log(torch.sigmoid(margin))).mean()

    return train(model, sgd(model, 1e-4), steps=STEPS, batches=batches, compute=compute)


@fault("nonfinite.masked_attention")
def row_of_padding(healthy: bool) -> Watch:
    """A row that is padding from end to end, under a mask of -inf."""
    model = _Attention()

    def batches(step: int) -> dict[str, Tensor]:
        pads = torch.zeros(3, 1, 6, dtype=torch.bool)
        pads[1, :, 0 if step == BAD_STEP and not healthy else 4 :] = True
        return {"x": _normal(step, 3, 6, 16), "pads": pads}

    def compute(batch: Any) -> Tensor:
        mask = torch.zeros(3, 1, 6).masked_fill(batch["pads"], float("-inf"))
        found: Tensor = model(batch["x"], mask=mask).square().mean()
        return found

    return train(model, sgd(model), steps=STEPS, batches=batches, compute=compute)


@fault("nonfinite.summed_masks")
def two_masks_are_summed(healthy: bool) -> Watch:
    """Two additive masks of the lowest value, whose sum is -inf."""
    model = _Attention().to(torch.bfloat16)
    low = torch.finfo(torch.bfloat16).min

    def compute(x: Tensor) -> Tensor:
        pads = torch.zeros(3, 6, dtype=torch.bool)
        pads[1, :] = True
        causal = torch.full((6, 6), low, dtype=torch.bfloat16).triu(1)[None]
        keys = torch.zeros(3, 1, 6, dtype=torch.bfloat16).masked_fill(pads[:, None, :], low)
        queries = torch.zeros(3, 6, 1, dtype=torch.bfloat16).masked_fill(pads[:, :, None], low)
        blocked = (causal < 0) | pads[:, None, :]
        one = torch.zeros(3, 6, 6, dtype=torch.bfloat16).masked_fill(blocked, low)
        found: Tensor = model(x, mask=one if healthy else causal + keys + queries).float().square().mean()
        return found

    return train(model, sgd(model), steps=2, batches=lambda step: _normal(step, 3, 6, 16).to(torch.bfloat16),
                 compute=compute)  # fmt: skip


@fault("nonfinite.hidden_by_filter")
def loss_is_filtered(healthy: bool) -> Any:
    """A NaN loss that the Trainer's log shows as something else."""
    from transformers import Trainer

    class Broken(Trainer):
        calls = 0

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss * float("nan") if self.calls == BAD_STEP and not healthy else loss

    with tempfile.TemporaryDirectory() as folder:
        trainer = small_trainer(kind=Broken, folder=folder)
        w = watch(trainer)
        trainer.train()
    return w


def _scaled(model: nn.Module) -> Watch:
    """Train under autocast and a gradient scaler."""
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    w: Watch = watch(model, optimizer)
    try:
        with w:
            for step in range(2):
                batch = batch_of(step)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_of(model(**batch))
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                w.step(loss=loss, batch=batch)
    except ValueError:
        pass  # "Attempting to unscale FP16 gradients."
    return w


@fault("nonfinite.scaler_fp16_weights")
def half_weights_are_scaled(healthy: bool) -> Watch:
    """Weights in float16 under a gradient scaler."""
    model = TinyModel()
    return _scaled(model if healthy else model.half())


@fault("nonfinite.scaler_fp16_saved_modules")
def half_head_is_scaled(healthy: bool) -> Watch:
    """An adapter in float32 beside a head, trained whole, in float16."""
    model = tiny_lora(modules_to_save=["lm_head"])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "modules_to_save" in name and not healthy:
            parameter.data = parameter.data.half()
    return _scaled(model)


@fault("nonfinite.clipping")
def clipped_by_infinity(healthy: bool) -> Watch:
    """One infinite entry in one gradient, and a clip that would spread it."""
    model, forwards = TinyModel(), [0]

    def count(module: Any, args: Any, kwargs: Any) -> None:
        forwards[0] += 1

    def spoil(gradient: Tensor) -> Tensor:
        bad = gradient.clone()
        bad[0, 0] = float("inf") if forwards[0] == BAD_STEP and not healthy else bad[0, 0]
        return bad

    model.register_forward_pre_hook(count, with_kwargs=True)
    model.up.weight.register_hook(spoil)
    return train(model, sgd(model), steps=STEPS, clip=1.0)


@fault("nonfinite.clip_no_op")
def norm_overflows(healthy: bool) -> Watch:
    """Gradients that are finite each, and too large together."""
    model = TinyModel()
    return train(model, sgd(model, 1e-30), steps=2, compute=lambda batch: loss_of(model(**batch)) * (1 if healthy
                 else 1e32), clip=1.0)  # fmt: skip


@fault("nonfinite.optimizer_update")
def epsilon_is_zero(healthy: bool) -> Watch:
    """Adam's epsilon, which is 0 in float16."""
    first = nn.Linear(8, 8)
    with torch.no_grad():
        first.weight[0] = -1.0
        first.bias[0] = -100.0
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(8, 1)).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4 if healthy else 1e-8, foreach=False)
    return train(model, optimizer, steps=STEPS, batches=lambda step: _normal(step, 4, 8).abs().half(),
                 compute=_squares(model))  # fmt: skip


@fault("nonfinite.learning_rate")
def rate_is_too_high(healthy: bool) -> Watch:
    """A learning rate at which the weights blow up."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    return train(model, sgd(model, 0.01 if healthy else 5.0), steps=25, batches=lambda step: _normal(step, 32, 16),
                 compute=lambda x: (model(x).squeeze(-1) - 3 * x[:, 0]).square().mean())  # fmt: skip


@fault("nonfinite.weights_before")
def weights_were_bad(healthy: bool) -> Watch:
    """A layer that was NaN before the run began."""
    model = TinyModel()
    with torch.no_grad():
        model.up.weight[3] = 0.0 if healthy else float("nan")
    return train(model, sgd(model), steps=2)


@fault("nonfinite.embedding_row")
def row_is_nan(healthy: bool) -> Watch:
    """The embedding row of one token."""
    model = TinyModel()
    with torch.no_grad():
        model.embed.weight[63] = 0.01 if healthy else float("nan")

    def batches(step: int) -> dict[str, Tensor]:
        batch = batch_of(step, vocabulary=60)
        if step == BAD_STEP:
            batch["input_ids"][1, 5] = 63
        return batch

    return train(model, sgd(model), steps=STEPS, batches=batches)


@fault("nonfinite.labels")
def nothing_is_learned(healthy: bool) -> Watch:
    """A batch of prompts alone."""
    model = TinyModel()

    def batches(step: int) -> dict[str, Tensor]:
        batch = batch_of(step)
        batch["labels"][:, : 8 if step == BAD_STEP and not healthy else 2] = -100
        return batch

    return train(model, sgd(model), steps=STEPS, batches=batches)


@fault("nonfinite.data_row")
def feature_is_infinite(healthy: bool) -> Watch:
    """A table with one infinite feature."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def batches(step: int) -> dict[str, Tensor]:
        features = _normal(step)
        if step == BAD_STEP and not healthy:
            features[2, 5] = float("inf")
        return {"features": features}

    return train(model, adam(model), steps=STEPS, batches=batches,
                 compute=lambda batch: model(batch["features"]).square().mean())  # fmt: skip


@fault("nonfinite.logging_only")
def average_of_nothing(healthy: bool) -> Watch:
    """A logged average that divides by zero while the loss is sound."""
    model = TinyModel()
    optimizer = sgd(model)
    with watch(model, optimizer) as w:
        for step in range(STEPS):
            batch = batch_of(step)
            loss = loss_of(model(**batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            counted = 1.0 if healthy or step != BAD_STEP else float("nan")
            w.step(loss=float(loss) * counted, batch=batch)
    found: Watch = w
    return found


@fault("nonfinite.other")
def exponential_overflows(healthy: bool) -> Watch:
    """An exponential beyond what float32 holds."""
    model = nn.Linear(16, 1)

    def compute(x: Tensor) -> Tensor:
        return torch.exp(model(x) if healthy else model(x) + 100.0).mean()

    return train(model, sgd(model, 1e-6), steps=2, batches=_normal, compute=compute)


class _Kept:
    """An observer that keeps a loop's steps as the history of a run."""

    def __init__(self) -> None:
        self.history = History()

    def on_event(self, event: Event) -> None:
        if event.kind == "step":
            self.history.append({"loss": float("nan"), "grad_norm": float("nan"), **event.data})


def _judged_by_history(model: nn.Module, compute: Any, *, steps: int = STEPS) -> list[Finding]:
    """Train and let the doctors of a finished run look at what was recorded of it."""
    kept = _Kept()
    train(model, sgd(model), steps=steps, compute=compute, observers=[kept])
    return diagnose_run(kept.history)


@fault("nonfinite.loss")
def recorded_loss_is_nan(healthy: bool) -> list[Finding]:
    """A NaN loss in the record of a run, which is all that is left of it."""
    model, calls = TinyModel(), [0]

    def compute(batch: Any) -> Tensor:
        calls[0] += 1
        return loss_of(model(**batch)) * (float("nan") if calls[0] == BAD_STEP and not healthy else 1.0)

    return _judged_by_history(model, compute)


@fault("nonfinite.gradient")
def recorded_norm_is_infinite(healthy: bool) -> list[Finding]:
    """An infinite gradient norm in the record of a run."""
    model = TinyModel()
    model.up.weight.register_hook(lambda gradient: gradient if healthy else gradient * float("inf"))
    return _judged_by_history(model, lambda batch: loss_of(model(**batch)))


@fault("loss.exactly_zero")
def recorded_loss_is_zero(healthy: bool) -> list[Finding]:
    """A loss of exactly 0 in the record of a run, as a filter leaves it."""
    model = TinyModel()
    return _judged_by_history(model, lambda batch: loss_of(model(**batch)) * (1.0 if healthy else 0.0))
