"""plan_run: the marginal effect of every toggle, and changes that make a run fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import EstimateError, ModelError, RecipeError
from ..estimate import BatchShape, Estimate, estimate_run
from ..estimate.shape import full_shape, reshaped
from ..events import Cancel, Progress, ProgressCallback
from ..hardware import Device, target_device
from ..recipe import FieldInfo, Recipe, iter_fields
from .plan import Plan, PlanOption, ToggleEffect

# Options shown at most; the first ones are the least intrusive.
MAX_OPTIONS = 5


def plan_run(
    recipe: Recipe,
    device: Device | None = None,
    *,
    shape: BatchShape | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> Plan:
    """Estimate every other value of every toggle, and search for changes that make the run fit.

    Args:
        recipe: The settings.
        device: The target; None takes the Recipe's.
        shape: Batches, from ``shape_of_data``; None assumes that every sample fills ``max_length``.
        progress: Told about the stage ``"plan"``.
        cancel: Looked at between estimates.

    Raises:
        RecipeError: The recipe itself is wrong; changes that the rules forbid are left out.
        ModelError: The model is unknown.
        EstimateError: The run cannot be traced.
        Cancelled: The user cancelled.
    """
    target = device or target_device(recipe)
    planner = _Planner(recipe, target, shape or full_shape(recipe), cancel)
    base = planner.base
    changes = [(info.path, value) for info in iter_fields() if info.toggle for value in other_values(info, recipe)]
    effects = []
    for index, (path, value) in enumerate(changes):
        if progress is not None:
            progress(Progress("plan", index, len(changes), f"{path} = {value}"))
        estimate = planner.estimate({path: value})
        if estimate is not None:
            effects.append(
                ToggleEffect(
                    field=path,
                    value=value,
                    memory_delta_bytes=estimate.memory.process_bytes - base.memory.process_bytes,
                    step_delta_s=estimate.time.step_s - base.time.step_s,
                    verdict=estimate.memory.verdict,
                )
            )
    return Plan(
        recipe_digest=recipe.digest(),
        device_name=target.name,
        process_bytes=base.memory.process_bytes,
        capacity_bytes=base.memory.capacity_bytes,
        step_s=base.time.step_s,
        verdict=base.memory.verdict,
        effects=tuple(effects),
        options=tuple(planner.options()),
    )


def other_values(info: FieldInfo, recipe: Recipe) -> list[Any]:
    """Return the values of a toggle worth trying: the other ones, or half and double of a number."""
    value = recipe.get(info.path)
    if info.type_name == "bool":
        return [not value]
    if info.type_name == "choice":
        return [choice for choice in info.choices if choice != value]
    if info.type_name == "int":
        low, high = info.minimum, info.maximum
        near = [value // 2, value * 2]
        return [item for item in near if (low is None or item >= low) and (high is None or item <= high)]
    return []


class _Planner:
    def __init__(self, recipe: Recipe, device: Device, shape: BatchShape, cancel: Cancel | None) -> None:
        self.recipe, self.device, self.shape, self.cancel = recipe, device, shape, cancel
        self.base = estimate_run(recipe, device, shape=shape, cancel=cancel)

    def estimate(self, changes: Mapping[str, Any]) -> Estimate | None:
        """Return the estimate with changes, or None where they are not allowed or cannot be traced."""
        if self.cancel is not None:
            self.cancel.check()
        try:
            changed = self.recipe.with_changes(changes)
            shape = reshaped(self.shape, self.recipe, changed)
            return estimate_run(changed, self.device, shape=shape, cancel=self.cancel)
        except (RecipeError, EstimateError, ModelError):
            return None

    def options(self) -> list[PlanOption]:
        """Return changes that make the run fit: single ones, then ever more of them together; fastest first."""
        if self.base.memory.verdict == "fits":
            return []
        steps = list(self._steps())
        found = [option for step in steps if (option := self._option(step)) is not None]
        together: dict[str, Any] = {}
        for step in steps:
            if any(field in together for field in step):
                continue
            together |= step
            if len(together) > len(step) and len(found) < MAX_OPTIONS:
                option = self._option(together)
                if option is not None:
                    found.append(option)
                    break  # More changes than needed help nobody.
        unique = {tuple(sorted(option.changes.items())): option for option in found}
        best_first = sorted(unique.values(), key=lambda option: (option.verdict != "fits", option.step_s))
        return best_first[:MAX_OPTIONS]

    def _option(self, changes: Mapping[str, Any]) -> PlanOption | None:
        estimate = self.estimate(changes)
        if estimate is None or estimate.memory.verdict == "does_not_fit":
            return None
        if estimate.memory.verdict == "tight" and self.base.memory.verdict == "tight":
            return None
        return PlanOption(dict(changes), estimate.memory.process_bytes, estimate.time.step_s, estimate.memory.verdict)

    def _steps(self) -> Iterator[dict[str, Any]]:
        """Yield changes from the least intrusive to the most; none changes samples per optimizer step."""
        recipe = self.recipe
        training = recipe.training
        if self.device.has_caching_allocator and not recipe.hardware.expandable_segments:
            yield {"hardware.expandable_segments": True}
        if training.loss_type != "chunked_nll":
            yield {"training.loss_type": "chunked_nll"}
        if self.base.memory.peak_phase == "evaluation" and recipe.evaluation.per_device_eval_batch_size > 1:
            yield {"evaluation.per_device_eval_batch_size": 1}
        if not training.gradient_checkpointing:
            yield {"training.gradient_checkpointing": True}
        batch, count = training.per_device_train_batch_size, training.gradient_accumulation_steps
        while batch > 1 and batch % 2 == 0:
            batch, count = batch // 2, count * 2
            yield {"training.per_device_train_batch_size": batch, "training.gradient_accumulation_steps": count}
        if training.optim in ("adamw_torch", "adamw_torch_fused"):
            yield {"training.optim": "paged_adamw_8bit" if recipe.adapter.method == "none" else "adamw_bnb_8bit"}
        if recipe.adapter.method == "lora" and not recipe.quantization.bits:
            yield {"quantization.load_in_4bit": True}
        if recipe.adapter.method == "none":
            yield {"adapter.method": "lora"}
