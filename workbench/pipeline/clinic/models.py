"""Faults of the model, its adapter, its optimizer, and of what is saved of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ...diagnose.finding import Finding
from ..checking import check
from ..watching import Watch
from .library import fault
from .parts import TinyModel, adam, batch_of, loss_of, sgd, tiny_llama, tiny_lora, token_rows, train


@fault("model.no_trainable")
def all_is_frozen(healthy: bool) -> list[Finding]:
    """A model of which every parameter is frozen."""
    return check({"model": TinyModel().requires_grad_(healthy)})


@fault("model.loss_without_graph")
def checkpointing_without_inputs(healthy: bool) -> list[Finding]:
    """Re-entrant checkpointing over inputs that need no gradient."""
    model = tiny_lora()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads() if healthy else model.disable_input_require_grads()
    return check({"model": model})


@fault("model.adapter_no_gradient")
def only_the_head_learns(healthy: bool) -> list[Finding]:
    """The same with an adapted head, which hides that the layers get no gradient."""
    model = tiny_lora(target_modules=["q_proj", "v_proj", "lm_head"])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads() if healthy else model.disable_input_require_grads()
    return check({"model": model})


@fault("model.adapter_frozen")
def adapter_loaded_for_inference(healthy: bool) -> list[Finding]:
    """An adapter that was loaded without is_trainable."""
    from peft import PeftModel

    with tempfile.TemporaryDirectory() as folder:
        tiny_lora().save_pretrained(folder)
        return check({"model": PeftModel.from_pretrained(tiny_llama(), folder, is_trainable=healthy)})


@fault("model.adapter_not_attached")
def target_is_misspelt(healthy: bool) -> list[Finding]:
    """A target that no module bears."""
    return check({"model": tiny_lora(target_modules=["q_proj", "v_proj" if healthy else "value_projection"])})


@fault("model.optimizer_misses")
def optimizer_before_the_adapter(healthy: bool) -> list[Finding]:
    """An optimizer that was built before the adapter."""
    base = tiny_llama()
    early = sgd(base)
    model = tiny_lora(base)
    return check({"model": model, "optimizer": sgd(model) if healthy else early})


@fault("model.extra_trainable")
def norms_train_too(healthy: bool) -> list[Finding]:
    """Norms that train beside an adapter and are not saved with it."""
    model = tiny_lora()
    for name, parameter in model.named_parameters():
        if "norm" in name and not healthy:
            parameter.requires_grad_(True)
    return check({"model": model})


@fault("model.tie_broken")
def tie_is_broken(healthy: bool) -> list[Finding]:
    """Tied embeddings of which one is trained as a copy."""
    saved = {} if healthy else {"modules_to_save": ["embed_tokens"]}
    return check({"model": tiny_lora(tiny_llama(tie_word_embeddings=True), **saved)})


@fault("model.new_rows_not_saved")
def new_rows_are_frozen(healthy: bool) -> list[Finding]:
    """Token rows that were added under an adapter that does not train them."""
    model = tiny_llama()
    model.resize_token_embeddings(68)
    return check({"model": tiny_lora(model, **({"trainable_token_indices": [64, 65, 66, 67]} if healthy else {}))})


@fault("model.new_rows_far")
def new_rows_are_far(healthy: bool) -> list[Finding]:
    """Token rows that were initialised far from the others."""
    model = tiny_llama()
    model.resize_token_embeddings(68)
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[64:] *= 1.0 if healthy else 1e4
    return check({"model": model})


@fault("model.embedding_row")
def row_is_zero(healthy: bool) -> list[Finding]:
    """The embedding row of a token of the data is zero."""
    model = tiny_llama()
    rows = token_rows(8)
    with torch.no_grad():
        model.get_input_embeddings().weight[rows[0]["input_ids"][2]] *= 1.0 if healthy else 0.0
    return check({"model": model, "dataset": rows})


@fault("model.weights_not_moving")
def steps_round_away(healthy: bool) -> Watch:
    """Steps below the spacing of bfloat16."""
    model = TinyModel() if healthy else TinyModel().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 if healthy else 1e-9, weight_decay=0.0)
    return train(model, optimizer, steps=12)


@fault("save.adapter_empty")
def adapter_file_is_empty(healthy: bool) -> list[Finding]:
    """An adapter that was saved with an empty state dict."""
    model = tiny_lora()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **({} if healthy else {"state_dict": {}}))
        return check({"model": model, "saved_folder": folder})


@fault("save.read_back")
def adapter_file_is_older(healthy: bool) -> list[Finding]:
    """An adapter file from before the last steps."""
    model = tiny_lora()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if not healthy:
            optimizer = sgd(model, 1.0)
            loss_of(model(**batch_of(0))).backward()
            optimizer.step()
        return check({"model": model, "saved_folder": folder})


@fault("speed.use_cache_off")
def cache_is_saved_off(healthy: bool) -> list[Finding]:
    """A model that was saved with the cache turned off for training."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama()
        model.config.use_cache = healthy
        model.config.save_pretrained(folder)
        if not Path(folder, "config.json").exists():
            raise RuntimeError("the configuration was not written")
        return check({"saved_folder": folder})


@fault("resume.optimizer_missing")
def moments_are_lost(healthy: bool) -> list[Finding]:
    """A run that goes on with a new optimizer."""
    model = TinyModel()

    def parts() -> tuple[Any, Any]:
        optimizer = adam(model)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 20)

    optimizer, scheduler = parts()
    for step in range(3):
        loss_of(model(**batch_of(step))).backward()
        optimizer.step()
        scheduler.step()
    saved = optimizer.state_dict(), scheduler.state_dict()
    optimizer, scheduler = parts()
    if healthy:
        optimizer.load_state_dict(saved[0])
        scheduler.load_state_dict(saved[1])
    return check({"model": model, "optimizer": optimizer, "scheduler": scheduler, "resumed_step": 3})


@fault("training.double_scaler")
def scaled_twice(healthy: bool) -> list[Finding]:
    """A gradient scaler of the loop's own beside the trainer's."""
    scaler = torch.amp.GradScaler("cpu")
    return check({"args": SimpleNamespace(fp16=not healthy), "scaler": scaler})


class _Drifting(nn.Module):
    """A layer that is another function each time it runs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.num_calls = inner, 0

    def forward(self, states: Tensor) -> Tensor:
        self.num_calls += 1
        found: Tensor = self.inner(states * (1.0 if self.num_calls % 2 else 3.0))
        return found


@fault("training.checkpointing_differs")
def recomputed_otherwise(healthy: bool) -> list[Finding]:
    """A layer with a state of its own under checkpointing: what is recomputed is not what was computed."""
    model = tiny_llama()
    if not healthy:
        model.model.layers[0].mlp = _Drifting(model.model.layers[0].mlp)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return check({"model": model, "dataset": token_rows(4)})
