"""The Pareto front of settings that fit: a local search over the same estimator, within a budget of estimates.

From the settings as they are, every single change is estimated; then every single change of the settings found that no
other beats, and so on until nothing new is found (then the front is complete as far as single changes reach) or the
budget is spent. While nothing fits, the search follows the memory downwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..estimate import BatchShape, Estimate
from ..events import Cancel, ProgressCallback
from ..hardware import Device
from ..recipe import Recipe
from .plan import PlanOption, SettingsFront
from .planner import Planner, option_of
from .space import Choice, Dimension, Freedom, dimensions, explicit_fields

# About ten to twenty seconds for a model of this size; the neighbours of four to six settings.
DEFAULT_BUDGET = 60
# Differences below this share of memory and time are no reason to change a setting.
NOTABLE = 0.02
_RANKS = {"fits": 0, "tight": 1, "does_not_fit": 2}

_Picks = tuple[int, ...]


def find_settings(
    recipe: Recipe,
    device: Device | None = None,
    *,
    shape: BatchShape | None = None,
    pinned: Collection[str] | None = None,
    freedom: Freedom = "numerics",
    budget: int = DEFAULT_BUDGET,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> SettingsFront:
    """Search the settings that fit and that no others beat in both memory and time.

    Samples per optimizer step are the same in all of them. What else a setting alters is said with it.

    Args:
        recipe: Where the search starts.
        device: The target; None takes the Recipe's.
        shape: Batches, from ``shape_of_data``; None assumes that every sample fills ``max_length``.
        pinned: Fields that keep their value; None pins those that differ from a plain Recipe.
        freedom: ``"nothing"`` tries only what learns the same up to rounding, ``"numerics"`` also number formats
            (8-bit optimizer state, 4-bit frozen weights, 16-bit products), ``"method"`` also LoRA in place of full
            fine-tuning.
        budget: Most settings to estimate.
        progress: Told about the stage ``"plan"``.
        cancel: Looked at in every estimate.

    Raises:
        RecipeError: The recipe itself is wrong; changes that the rules forbid are left out.
        ModelError: The model is unknown.
        EstimateError: The run cannot be traced.
        Cancelled: The user cancelled.
    """
    planner = Planner(recipe, device, shape, progress, cancel)
    kept = explicit_fields(recipe) if pinned is None else frozenset(pinned)
    search = _Search(planner, dimensions(recipe, planner.device, kept, freedom), budget)
    is_complete = search.run()
    current = search.found[search.start].option
    options = [node.option for node in search.front()]
    return SettingsFront(
        recipe_digest=recipe.digest(),
        device_name=planner.device.name,
        capacity_bytes=planner.device.capacity_bytes,
        effective_batch_size=recipe.training.effective_batch_size,
        current=current,
        options=tuple(sorted(options, key=lambda option: option.step_s)),
        pinned=tuple(sorted(kept)),
        num_estimates=planner.num_estimates,
        is_complete=is_complete,
    )


@dataclass(frozen=True)
class _Node:
    picks: _Picks
    option: PlanOption

    @property
    def rank(self) -> int:
        return _RANKS[self.option.verdict]


def beats(one: PlanOption, other: PlanOption, slack: float = 0.0) -> bool:
    """Whether ``one`` is as good in memory, time, certainty and what it alters, give or take a share ``slack``."""
    return (
        _RANKS[one.verdict] <= _RANKS[other.verdict]
        and one.process_bytes <= other.process_bytes * (1 + slack)
        and one.step_s <= other.step_s * (1 + slack)
        and set(one.alters) <= set(other.alters)
    )


class _Search:
    def __init__(self, planner: Planner, space: list[Dimension], budget: int) -> None:
        self.planner, self.space, self.budget = planner, space, budget
        self.start: _Picks = tuple(dimension.start for dimension in space)
        self.found: dict[_Picks, _Node] = {}
        self.refused: set[_Picks] = set()
        self.expanded: set[_Picks] = set()

    def run(self) -> bool:
        """Search; return False where the budget ended it."""
        self._keep(self.start, self.planner.base())
        while (node := self._next()) is not None:
            for picks in self._neighbours(node.picks):
                if picks in self.found or picks in self.refused:
                    continue
                if self.planner.num_estimates >= self.budget:
                    return False
                self._try(picks)
            self.expanded.add(node.picks)
        return True

    def front(self) -> list[_Node]:
        """Return the nodes that fit and that no other beats; where they are alike, those with the fewest changes."""
        fitting = [node for node in self.found.values() if node.rank < _RANKS["does_not_fit"]]
        ordered = sorted(fitting, key=lambda node: (len(node.option.changes), node.option.step_s))
        kept: list[_Node] = []
        for node in ordered:
            if any(beats(other.option, node.option, NOTABLE) for other in kept):
                continue
            kept = [other for other in kept if not beats(node.option, other.option)]
            kept.append(node)
        return kept

    def _next(self) -> _Node | None:
        """Return the node to look around next: the fastest of the front, else the smallest of all."""
        waiting = [node for node in self.front() if node.picks not in self.expanded]
        if waiting:
            return min(waiting, key=lambda node: (len(node.option.alters), node.option.step_s))
        if any(node.rank < _RANKS["does_not_fit"] for node in self.found.values()):
            return None
        left = [node for node in self.found.values() if node.picks not in self.expanded]
        return min(left, key=lambda node: (node.option.process_bytes, len(node.option.alters)), default=None)

    def _neighbours(self, picks: _Picks) -> Iterator[_Picks]:
        for index, dimension in enumerate(self.space):
            for other in range(len(dimension.choices)):
                distance = abs(other - picks[index])
                if distance == 1 or (distance and not dimension.is_ordered):
                    yield (*picks[:index], other, *picks[index + 1 :])

    def _try(self, picks: _Picks) -> None:
        choices = self._choices(picks)
        words = ", ".join(
            f"{path.rpartition('.')[2]}={value}" for one in choices for path, value in one.changes.items()
        )
        self.planner.tell(self.planner.num_estimates, self.budget, words or "the settings as they are")
        estimate = self.planner.estimate({path: value for one in choices for path, value in one.changes.items()})
        if estimate is None:
            self.refused.add(picks)
        else:
            self._keep(picks, estimate)

    def _keep(self, picks: _Picks, estimate: Estimate) -> None:
        choices = self._choices(picks)
        changes = {path: value for choice in choices for path, value in choice.changes.items()}
        alters = tuple(choice.alters for choice in choices if choice.alters)
        self.found[picks] = _Node(picks, option_of(changes, estimate, alters))

    def _choices(self, picks: _Picks) -> list[Choice]:
        return [dimension.choices[pick] for dimension, pick in zip(self.space, picks, strict=True)]
