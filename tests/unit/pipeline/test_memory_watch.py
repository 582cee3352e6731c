"""Life marks: whether what a forward pass returned, or the graph behind it, is alive steps later."""

import torch
from torch import Tensor, nn

from workbench.pipeline.memory_watch import MARK_AGE, LifeMarks

STEPS = MARK_AGE + 8


def marked(keep: object, *, steps: int = STEPS) -> list[bool]:
    """Run forward passes, hand each loss to ``keep`` and return what the marks said after each step."""
    model, marks, said = nn.Linear(4, 1), LifeMarks(), []
    for step in range(steps):
        loss = model(torch.randn(2, 4)).mean()
        marks.lay([loss])
        keep(loss, step)  # type: ignore[operator]
        said.append(marks.step())
    return said


def test_losses_that_are_let_go_leave_no_mark() -> None:
    assert not any(marked(lambda loss, step: None))


def test_a_list_of_losses_is_seen_from_the_first_full_window_on() -> None:
    kept: list[Tensor] = []
    said = marked(lambda loss, step: kept.append(loss))
    assert said.index(True) == MARK_AGE + 3 and all(said[MARK_AGE + 3 :])


def test_a_running_total_is_seen_though_each_loss_is_gone() -> None:
    total = [torch.zeros(())]

    def add(loss: Tensor, step: int) -> None:
        total[0] = total[0] + loss

    assert marked(add)[-1]


def test_detached_outputs_are_seen_by_their_storage() -> None:
    kept: list[Tensor] = []
    assert marked(lambda loss, step: kept.append(loss.detach()))[-1]


def test_what_is_kept_now_and_then_or_for_a_few_steps_is_left_to_the_counter() -> None:
    kept: list[Tensor] = []
    assert not any(marked(lambda loss, step: kept.append(loss) if step % 4 == 0 else None))
    recent: list[Tensor] = []

    def keep_three(loss: Tensor, step: int) -> None:
        recent.append(loss)
        del recent[:-3]

    assert not any(marked(keep_three))


def test_a_parameter_that_is_returned_is_not_marked() -> None:
    marks, parameter = LifeMarks(), nn.Parameter(torch.ones(2))
    said = []
    for _ in range(STEPS):
        marks.lay([parameter])
        said.append(marks.step())
    assert not any(said)
