"""What a plan says. Plain data: no torch, so that panel, CLI and report read it for free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..estimate.estimate import VERDICT_TEXTS, Verdict
from ..units import format_bytes, format_seconds


@dataclass(frozen=True)
class ToggleEffect:
    """What one change of one field would do, everything else kept.

    Attributes:
        field: Dotted path.
        value: The other value.
        memory_delta_bytes: Change of ``process_bytes``.
        step_delta_s: Change of ``step_s``.
        verdict: Whether the run would fit then.
    """

    field: str
    value: Any
    memory_delta_bytes: int
    step_delta_s: float
    verdict: Verdict


@dataclass(frozen=True)
class PlanOption:
    """Changes that make the run fit; samples per optimizer step stay the same.

    Attributes:
        changes: ``{field: value}``, to be given to ``Recipe.with_changes``; empty for the settings as they are.
        process_bytes: Predicted memory with them.
        step_s: Predicted step time with them.
        verdict: ``"fits"`` or ``"tight"`` where it is offered as a way to make the run fit.
        alters: What the changes alter beyond memory, time and rounding, in words; empty: the run learns the same.
        cost_usd_per_1000_tokens: ``(low, high)``, or None where no price is known.
    """

    changes: Mapping[str, Any]
    process_bytes: int
    step_s: float
    verdict: Verdict
    alters: Sequence[str] = ()
    cost_usd_per_1000_tokens: tuple[float, float] | None = None

    def __str__(self) -> str:
        changes = ", ".join(f"{field}={value}" for field, value in self.changes.items()) or "no change"
        alters = f" It {', '.join(self.alters)}." if self.alters else ""
        return (
            f"{VERDICT_TEXTS[self.verdict].capitalize()} with {changes}: {format_bytes(self.process_bytes)}, "
            f"{format_seconds(self.step_s)} a step.{alters}"
        )


@dataclass(frozen=True)
class Plan:
    """Effects of every toggle, and ways to make the run fit.

    Attributes:
        recipe_digest: Of the recipe it is for.
        device_name: The device it is for.
        process_bytes: Predicted memory of the recipe as it is.
        capacity_bytes: What the device offers.
        step_s: Predicted step time of the recipe as it is.
        verdict: Of the recipe as it is.
        effects: One for every other value of every toggle that the rules allow.
        options: Fastest first, those that alter nothing before the others; empty where the recipe fits already or
            nothing makes it fit.
    """

    recipe_digest: str
    device_name: str
    process_bytes: int
    capacity_bytes: int
    step_s: float
    verdict: Verdict
    effects: Sequence[ToggleEffect]
    options: Sequence[PlanOption]


@dataclass(frozen=True)
class SettingsFront:
    """The settings that fit and that no other settings beat in both memory and time.

    Attributes:
        recipe_digest: Of the recipe it starts from.
        device_name: The device it is for.
        capacity_bytes: What the device offers.
        effective_batch_size: Samples per optimizer step, the same in all of them.
        current: The settings as they are, whether they fit or not.
        options: Fastest first; the settings as they are may be one of them, with no changes.
        pinned: Fields that were kept as they are.
        num_estimates: Settings that were estimated.
        is_complete: False where the budget ended the search.
    """

    recipe_digest: str
    device_name: str
    capacity_bytes: int
    effective_batch_size: int
    current: PlanOption
    options: Sequence[PlanOption]
    pinned: Sequence[str] = ()
    num_estimates: int = 0
    is_complete: bool = True

    @property
    def best(self) -> PlanOption | None:
        """The fastest that surely fits, of those that alter least; None where nothing fits."""
        return min(self.options, key=preference, default=None)


def preference(option: PlanOption) -> tuple[bool, int, float]:
    """Return what options are compared by when one is to be taken: sure to fit, altering little, fast."""
    return option.verdict != "fits", len(option.alters), option.step_s


@dataclass(frozen=True)
class Tried:
    """One value that was estimated on the way to the largest.

    Attributes:
        value: Batch size, length in tokens, or name of a model.
        process_bytes: Predicted memory.
        step_s: Predicted step time.
        verdict: Whether it fits.
    """

    value: Any
    process_bytes: int
    step_s: float
    verdict: Verdict


@dataclass(frozen=True)
class Largest:
    """The largest batch, sequence length or model that fits, everything else kept.

    Attributes:
        what: ``"batch"``, ``"length"`` or ``"model"``.
        device_name: The device it is for.
        capacity_bytes: What the device offers.
        value: Samples in one forward pass, tokens per sample, or a model's name; None where not even the smallest fits.
        changes: What sets it; samples per optimizer step stay the same, so that a batch may be a smaller one than
            ``value``.
        limit: Why it is not larger, one sentence.
        tried: All values that were estimated, smallest first.
        num_estimates: Their number, and of other models that could not be estimated.
    """

    what: str
    device_name: str
    capacity_bytes: int
    value: Any
    changes: Mapping[str, Any]
    limit: str
    tried: Sequence[Tried] = ()
    num_estimates: int = 0


@dataclass(frozen=True)
class DeviceChoice:
    """What a run would be on one device of the table.

    Attributes:
        name: The device.
        capacity_bytes: What it offers to a process.
        verdict: Whether the run fits, or None where it cannot run there; ``problem`` then says why.
        process_bytes: Predicted memory.
        step_s: Predicted step time; infinite where it cannot run.
        tokens_per_s: Real tokens per second.
        total_s: Seconds of the whole run, or None where the number of steps is not known.
        cost_usd: ``(low, high)`` of the whole run, or None.
        cost_usd_per_1000_tokens: ``(low, high)``, or None where the table has no price.
        problem: Why it cannot run there; empty otherwise.
    """

    name: str
    capacity_bytes: int
    verdict: Verdict | None
    process_bytes: int = 0
    step_s: float = float("inf")
    tokens_per_s: float = 0.0
    total_s: float | None = None
    cost_usd: tuple[float, float] | None = None
    cost_usd_per_1000_tokens: tuple[float, float] | None = None
    problem: str = ""


@dataclass(frozen=True)
class DeviceTable:
    """Which devices a run fits on.

    Attributes:
        recipe_digest: Of the recipe it is for.
        choices: Those that fit first, of these the cheapest per token first; those without a price after them.
        notes: What a person should know of the figures.
    """

    recipe_digest: str
    choices: Sequence[DeviceChoice]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def fitting(self) -> list[DeviceChoice]:
        """Devices that the run surely fits on."""
        return [choice for choice in self.choices if choice.verdict == "fits"]

    @property
    def smallest(self) -> DeviceChoice | None:
        """The device with the least memory that the run surely fits on."""
        return min(self.fitting, key=lambda choice: (choice.capacity_bytes, choice.step_s), default=None)

    @property
    def fastest(self) -> DeviceChoice | None:
        """The device with the shortest step, of those that the run surely fits on."""
        return min(self.fitting, key=lambda choice: choice.step_s, default=None)

    @property
    def cheapest(self) -> DeviceChoice | None:
        """The device with the lowest price per token, of those that fit and have one."""
        priced = [choice for choice in self.fitting if choice.cost_usd_per_1000_tokens]
        return min(priced, key=price_of, default=None)


def price_of(choice: DeviceChoice) -> float:
    """Return the lowest price per 1,000 tokens; infinite where none is known."""
    return choice.cost_usd_per_1000_tokens[0] if choice.cost_usd_per_1000_tokens else float("inf")
