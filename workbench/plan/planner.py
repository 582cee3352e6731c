"""Planner: estimates of a recipe with changes, which all of this package asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import EstimateError, ModelError, RecipeError
from ..estimate import BatchShape, Estimate, estimate_run
from ..estimate.shape import full_shape, reshaped
from ..events import Cancel, Progress, ProgressCallback
from ..hardware import Device, target_device
from ..recipe import Recipe
from .plan import PlanOption


class Planner:
    """Estimates changed recipes for one device, counts them, tells how far it is, and looks at the cancel flag.

    Attributes:
        recipe: The settings that changes are made to.
        device: The target.
        shape: Batches of ``recipe``.
        num_estimates: Estimates asked for so far.
    """

    def __init__(
        self,
        recipe: Recipe,
        device: Device | None,
        shape: BatchShape | None,
        progress: ProgressCallback | None,
        cancel: Cancel | None,
    ) -> None:
        self.recipe = recipe
        self.device = device or target_device(recipe)
        self.shape = shape or full_shape(recipe)
        self.num_estimates = 0
        self._progress = progress
        self._cancel = cancel

    def base(self) -> Estimate:
        """Return the estimate of the recipe as it is.

        Raises:
            RecipeError, ModelError, EstimateError: There is none.
        """
        self.check()
        self.num_estimates += 1
        return estimate_run(self.recipe, self.device, shape=self.shape, cancel=self._cancel)

    def estimate(self, changes: Mapping[str, Any], device: Device | None = None) -> Estimate | None:
        """Return the estimate with changes, or None where they are not allowed or cannot be traced."""
        try:
            return self.require(changes, device)
        except (RecipeError, EstimateError, ModelError):
            return None

    def require(self, changes: Mapping[str, Any], device: Device | None = None) -> Estimate:
        """Return the estimate with changes.

        Raises:
            RecipeError, ModelError, EstimateError: There is none.
        """
        self.check()
        self.num_estimates += 1
        changed = self.recipe.with_changes(changes)
        shape = reshaped(self.shape, self.recipe, changed)
        return estimate_run(changed, device or self.device, shape=shape, cancel=self._cancel)

    def tell(self, done: float, total: float | None, message: str) -> None:
        """Report progress of the stage ``"plan"``."""
        if self._progress is not None:
            self._progress(Progress("plan", done, total, message))

    def check(self) -> None:
        """Raise Cancelled where the user cancelled."""
        if self._cancel is not None:
            self._cancel.check()


def option_of(changes: Mapping[str, Any], estimate: Estimate, alters: tuple[str, ...] = ()) -> PlanOption:
    """Return the option of an estimate."""
    return PlanOption(
        changes=dict(changes),
        process_bytes=estimate.memory.process_bytes,
        step_s=estimate.time.step_s,
        verdict=estimate.memory.verdict,
        alters=alters,
        cost_usd_per_1000_tokens=estimate.time.cost_usd_per_1000_tokens,
    )
