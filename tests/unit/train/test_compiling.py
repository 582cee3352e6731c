"""torch.compile in a run: the same losses, and what it took is told."""

from __future__ import annotations

import shutil

import pytest
import torch

from workbench.recipe import Recipe, TargetFacts, find_problems
from workbench.train.compiling import CompiledForward, break_even_steps, compile_mode

from .parts import small_recipe

COMPILE = {"training.torch_compile": True}


def _fields(changes, target=None):
    return {problem.field: problem for problem in find_problems(Recipe().with_changes({**COMPILE, **changes}), target)}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="a run on the CPU is refused without g++")
def test_a_compiled_run_has_the_losses_of_the_eager_one(tiny, monkeypatch):
    # All of torch.compile but its code generator, which takes g++ minutes on a busy machine.
    own = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, mode, dynamic: own(module, backend="aot_eager", dynamic=dynamic)
    )
    settings = {"training__max_steps": 5, "evaluation__split": "none"}
    eager = tiny(small_recipe(**settings), run_dir="eager").start().wait(60)
    session = tiny(small_recipe(**settings, training__torch_compile=True), run_dir="compiled").start().wait(280)
    losses = [[row["loss"] for row in one.log.of("step")] for one in (eager, session)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    (told,) = [data["compile"] for data in session.log.of("log") if "compile" in data]
    assert 1 <= told["num_compilations"] <= 4
    assert told["compile_s"] > 0


def _watched(step_times):
    """Feed times of steps into one that pretends to have compiled after the third; return what it said."""
    told = []
    recipe = small_recipe(training__torch_compile=True)
    compiled = CompiledForward(recipe, None, told.append)
    for step, step_s in enumerate(step_times, 1):
        compiled.is_on = step > 3
        compiled._num_before = compiled.num_compilations
        if step == 4:
            compiled._begin(None)
            compiled._end(None)
            compiled.compile_s = 3.0
        compiled.end_step(step, step_s, 100)
    return [event.data for event in told]


def test_the_break_even_step_counts_the_eager_ones():
    (told,) = _watched([9.0, 2.0, 2.0, 5.0, 1.5, 1.5, 1.5])
    assert told["compile"]["break_even_step"] == 3 + 6
    assert "paid off after step 9" in told["message"]


def test_slower_steps_never_pay_off():
    (told,) = _watched([9.0, 2.0, 2.0, 5.0, 2.5, 2.5, 2.5])
    assert "never pays off" in told["message"]
    assert "break_even_step" not in told["compile"]


def test_break_even_rounds_up():
    assert break_even_steps(10.0, 1.0, 0.7) == 34


def test_graphs_are_refused_where_shapes_move():
    graphs = {"training.torch_compile_mode": "reduce-overhead", "data.padding": "longest"}
    problem = _fields(graphs)["training.torch_compile_mode"]
    assert "another length" in problem.message
    assert not _fields({**graphs, **dict(problem.fix)})
    assert not _fields({**graphs, "data.packing": True})
    cpu = TargetFacts("CPU", "cpu", bf16_native=False, for_estimate=True)
    assert dict(_fields({**graphs, "data.padding": "max_length"}, cpu)["training.torch_compile_mode"].fix) == {
        "training.torch_compile_mode": "default"
    }


def test_autotuning_captures_no_graph_where_shapes_move():
    tuned = small_recipe(training__torch_compile_mode="max-autotune", data__padding="longest")
    assert compile_mode(tuned) == "max-autotune-no-cudagraphs"
    assert compile_mode(tuned.with_changes({"data.padding": "max_length"})) == "max-autotune"


def test_a_missing_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpu = TargetFacts("CPU", "cpu", bf16_native=False)
    assert "a C++ compiler (no-such-compiler)" in _fields({}, cpu)["training.torch_compile"].message


def test_the_emulated_allocator_is_not_deceived():
    cpu = TargetFacts("CPU", "cpu", bf16_native=False)
    assert "simulated allocator" in _fields({"hardware.emulate": "Tesla T4"}, cpu)["training.torch_compile"].message
