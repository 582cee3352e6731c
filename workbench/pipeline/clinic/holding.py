"""Faults that keep memory alive after its work is done."""

from __future__ import annotations

import gc
import sys
import traceback
from typing import Any

import torch
from torch import nn

from ..releasing import ReleaseReport, release
from .library import fault
from .parts import TinyModel, adam, batch_of, lora_config, loss_of, tiny_lora


def _fail() -> None:
    activations = torch.randn(128, 64)
    raise ValueError(f"failed after {tuple(activations.shape)}")


@fault("release.exception")
def last_exception(healthy: bool) -> ReleaseReport:
    """What ``sys.last_exc`` keeps after an error in a notebook."""
    before = {name: getattr(sys, name) for name in ("last_exc", "last_value", "last_traceback") if hasattr(sys, name)}
    try:
        _fail()
    except ValueError as error:
        if not healthy:
            sys.last_exc = sys.last_value = error  # type: ignore[attr-defined]  # last_exc is new in Python 3.12
    try:
        return release({}, clear_history=False)
    finally:
        for name, value in before.items():
            setattr(sys, name, value)


@fault("release.exception_chain")
def chained_exception(healthy: bool) -> ReleaseReport:
    """The inner exception of a chain whose outer frames were cleared."""

    def outer() -> None:
        try:
            _fail()
        except ValueError as error:
            raise RuntimeError("the batch failed") from error

    saved = None
    try:
        outer()
    except RuntimeError as error:
        if not healthy:
            saved = error
            traceback.clear_frames(saved.__traceback__)
    return release({"saved": saved}, clear_history=False)


class LoopTrainer:
    """A trainer of somebody's own; it refers to its model."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model


@fault("release.trainer")
def trainer_refers(healthy: bool) -> ReleaseReport:
    """A model that was deleted while its trainer was not."""
    trainer = LoopTrainer(TinyModel())
    if healthy:
        trainer.model = None
    return release({"trainer": trainer})


@fault("release.registry")
def registry_holds(healthy: bool) -> ReleaseReport:
    """A registry that holds the models of all earlier attempts."""

    class Registry:
        models: list[nn.Module]

    registry = Registry()
    registry.models = []
    for _ in range(4):
        registry.models.append(TinyModel())
        if healthy:
            registry.models.clear()
    return release({"registry": registry})


@fault("release.cycle")
def cycle_waits(healthy: bool) -> ReleaseReport:
    """Models in reference cycles while the collector has not come round."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(3):
            trainer = LoopTrainer(TinyModel())
            trainer.model.__dict__["owner"] = None if healthy else trainer
        del trainer
        return release({})
    finally:
        if was_enabled:
            gc.enable()


@fault("release.output_history")
def displayed_tensor(healthy: bool) -> ReleaseReport:
    """A tensor that a cell displayed."""
    names: dict[str, Any] = {"Out": {}, "_": ""}
    if not healthy:
        names["Out"][3] = names["_3"] = names["_"] = torch.randn(128, 64)
    return release(names)


@fault("release.optimizer")
def optimizer_refers(healthy: bool) -> ReleaseReport:
    """A model that was deleted while its optimizer was not."""
    model = TinyModel()
    optimizer: Any = adam(model)
    loss_of(model(**batch_of(0))).backward()
    optimizer.step()
    del model
    if healthy:
        optimizer = None
    return release({"optimizer": optimizer})


@fault("release.variable")
def variable_holds(healthy: bool) -> ReleaseReport:
    """A variable that holds activations of an earlier cell."""
    states = None if healthy else torch.randn(128, 64)
    return release({"states": states})


@fault("release.idle_adapters")
def adapters_stay(healthy: bool) -> ReleaseReport:
    """Adapters that are loaded and not active."""
    model = tiny_lora()
    for number in range(1 if healthy else 4):
        if healthy:
            model.delete_adapter("default")
        model.add_adapter(f"task{number}", lora_config(r=16))
        model.set_adapter(f"task{number}")
    return release({"model": model})
