"""Paths from names to what they hold."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from workbench.observe.holders import Root, find_holders, roots_of_frame, roots_of_namespace


def path_to(target: Any, **names: Any) -> str:
    return find_holders([target], roots_of_namespace(names))[id(target)].path


def test_paths_read_as_a_person_would_type_them() -> None:
    t = torch.zeros(2)
    assert path_to(t, losses=[torch.ones(1), t]) == "losses[1]"
    assert path_to(t, meter=SimpleNamespace(sum=t)) == "meter.sum"
    assert path_to(t, cache={"logits": t}) == "cache['logits']"
    assert path_to(t, recent=deque([t])) == "recent[0]"


def test_closures_and_defaults_are_followed() -> None:
    t = torch.zeros(2)

    def closure() -> torch.Tensor:
        return t

    def default(value: torch.Tensor = t) -> torch.Tensor:
        return value

    assert path_to(t, f=closure) == "f.<closure t>"
    assert path_to(t, f=default) == "f.__defaults__[0]"


def test_a_module_is_walked_by_its_attribute_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].last = torch.zeros(3)
    assert path_to(model[0].last, model=model) == "model[0].last"


def test_frames_of_a_kept_exception_are_followed_through_its_chain() -> None:
    def inner() -> None:
        held = torch.zeros(4)
        raise RuntimeError(str(held.shape))

    def outer() -> BaseException:
        try:
            try:
                inner()
            except RuntimeError as error:
                raise ValueError("outer") from error
        except ValueError as error:
            return error
        raise AssertionError

    saved = outer()
    traceback = saved.__context__.__traceback__  # type: ignore[union-attr]
    target = traceback.tb_next.tb_frame.f_locals["held"]  # type: ignore[union-attr]
    holder = find_holders([target], [Root("saved", "variable", saved)])[id(target)]
    assert "frame 'inner' local held" in holder.path and holder.path.startswith("saved.__c")


def test_the_output_history_is_named_as_such_and_asked_last() -> None:
    t = torch.zeros(2)
    found = find_holders([t], roots_of_namespace({"Out": {3: t}, "_3": t}))[id(t)]
    assert found.kind == "output history"
    assert path_to(t, Out={3: t}, mine=t) == "mine"


def test_locals_of_the_calling_script_are_roots() -> None:
    import sys

    kept = [torch.zeros(2)]
    assert "kept" in {root.name for root in roots_of_frame(sys._getframe())}
    kept.clear()


def test_the_search_is_bounded() -> None:
    t = torch.zeros(2)
    assert find_holders([t], [Root("deep", "variable", [[i] for i in range(1000)] + [t])], max_visited=50) == {}
