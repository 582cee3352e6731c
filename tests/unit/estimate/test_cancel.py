"""A trace that nobody wants any more ends within an operator, not within a phase."""

import pytest

from workbench.errors import Cancelled
from workbench.estimate import clear_caches, estimate_run
from workbench.events import Cancel
from workbench.hardware import find_device
from workbench.recipe import Recipe


class CancelAtCheck(Cancel):
    """Counts the checks, and is cancelled at a given one."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.num_checks = 0

    def check(self) -> None:
        self.num_checks += 1
        if self.num_checks == self.at:
            self.set()
        super().check()


def test_a_trace_is_checked_in_every_operator_and_the_next_one_is_whole() -> None:
    recipe = Recipe().with_changes({"model.name_or_path": "tiny-llama"})
    device = find_device("Tesla T4")
    clear_caches()
    never = CancelAtCheck(at=-1)
    whole = estimate_run(recipe, device, cancel=never)
    assert never.num_checks > 300
    clear_caches()
    with pytest.raises(Cancelled):
        estimate_run(recipe, device, cancel=CancelAtCheck(at=never.num_checks // 2))
    assert estimate_run(recipe, device).memory.breakdown == whole.memory.breakdown
