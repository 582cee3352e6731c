"""Prunes at the step that the Recipe names, says what it cost, and keeps the zeros until the run ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..components.pruning import apply_masks, choose_masks, read_masks, save_masks, sparsity_by_layer, write_zeros
from ..events import Event
from ..recipe import Recipe


class Pruner:
    """The pruning of one run.

    Args:
        recipe: The settings.
        model: The run's model.
        publish: Takes events.
        held_out_loss: Returns the mean loss on the held-out rows, None where there are none.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Any,
        publish: Callable[[Event], None],
        held_out_loss: Callable[[], float | None],
    ) -> None:
        self._recipe, self._model = recipe, model
        self._publish, self._held_out_loss = publish, held_out_loss
        self._is_wanted = recipe.pruning.method != "none"
        self.is_done = False
        self._held: list[Any] = []

    def before_step(self, step: int) -> float:
        """Prune where ``step`` optimizer steps are done and it is due; return the seconds it took."""
        wanted, began = self._recipe.pruning.step, time.perf_counter()
        if wanted is not None and step >= wanted:
            self._prune(step)
        return time.perf_counter() - began

    def at_end(self, step: int) -> None:
        """Prune what the run was too short for, or was to leave to the end."""
        self._prune(step)

    def after_update(self) -> None:
        """Write the zeros again."""
        write_zeros(self._held)

    def save(self, folder: Path) -> None:
        """Write which weights are pruned beside the weights."""
        if self.is_done:
            save_masks(self._model, folder)

    def restore(self, folder: Path) -> None:
        """Prune as the run that wrote ``folder`` had."""
        masks = read_masks(folder) if self._is_wanted else None
        if masks is not None:
            self._held = apply_masks(self._model, masks)
            self.is_done = True

    def _prune(self, step: int) -> None:
        if not self._is_wanted or self.is_done:
            return
        before = self._held_out_loss()
        self._held = apply_masks(self._model, choose_masks(self._recipe, self._model))
        self.is_done = True
        after = self._held_out_loss()
        sparsity = sparsity_by_layer(self._model)
        data = {
            "step": step,
            "method": self._recipe.pruning.method,
            "amount": self._recipe.pruning.amount,
            "sparsity": sparsity,
            "loss_before": before,
            "loss_after": after,
        }
        self._publish(Event("pruning", data))
        change = "" if before is None or after is None else f" Held-out loss {before:.4f} before, {after:.4f} after."
        text = f"Pruned after {step} steps: {sparsity['all']:.1%} of the layers' weights are zero.{change}"
        self._publish(Event("log", {"message": text}))
