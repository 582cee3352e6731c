"""torch.compile of a run's forward pass: what compiling took, how often, and when it has paid for itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from ..events import Event
from ..recipe import Recipe

# Steps of the run before the model is compiled: what the compiled ones are compared with. Counted from the run's first
# step, so that a resumed run computes each step as the uninterrupted one does. The first warms caches and is left out.
EAGER_STEPS = 3
# Steps without a compilation after which the two are compared.
COMPARED_STEPS = 3


def has_fixed_shapes(recipe: Recipe) -> bool:
    """Whether every micro-batch has the same shape, so that a CUDA graph can be replayed."""
    return recipe.data.packing or recipe.data.padding == "max_length"


def compile_mode(recipe: Recipe) -> str:
    """Return torch's mode: ``max-autotune`` also captures CUDA graphs, which moving shapes do not allow."""
    mode = recipe.training.torch_compile_mode
    return f"{mode}-no-cudagraphs" if mode == "max-autotune" and not has_fixed_shapes(recipe) else mode


class CompiledForward:
    """Compiles a model after a few eager steps and says what it brought."""

    def __init__(self, recipe: Recipe, model: nn.Module, publish: Callable[[Event], None]) -> None:
        """Make one; nothing is compiled before ``begin_step``.

        Args:
            recipe: ``training.torch_compile_mode`` and what decides whether shapes move.
            model: The model that the loss calls.
            publish: Receives what there is to say.
        """
        self._recipe, self._publish = recipe, publish
        # The chunked loss calls the model without its head.
        chunked = recipe.training.loss_type == "chunked_nll"
        wrapped: Any = model
        inner = wrapped.get_base_model() if hasattr(model, "get_base_model") else wrapped
        self._module: Any = inner.base_model if chunked else model
        self.is_on = False
        self.num_compilations = 0
        self.compile_s = 0.0
        self._began_s = 0.0
        self._num_before = 0
        self._eager: list[float] = []
        self._compiled: list[float] = []
        self._told, self._num_told = False, 0

    def begin_step(self, num_done: int) -> None:
        """Compile where enough eager steps are done."""
        if not self.is_on and num_done >= EAGER_STEPS:
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)
            dynamic = None if has_fixed_shapes(self._recipe) else True
            self._module.compile(mode=compile_mode(self._recipe), dynamic=dynamic)
            self.is_on = True
        self._num_before = self.num_compilations

    def end_step(self, step: int, step_s: float, num_slots: int) -> None:
        """Take the time of a step; micro-batches differ in length, so that it counts by token slots."""
        if num_slots == 0:
            return
        per_slot = step_s / num_slots
        if not self.is_on:
            self._eager += [per_slot] if step > 1 else []
        elif self.num_compilations == self._num_before:
            self._compiled.append(per_slot)
            if not self._told and len(self._compiled) >= COMPARED_STEPS:
                self._tell(step, num_slots)

    def close(self) -> None:
        """Give the compiled code and its CUDA graphs back; say so where there was too little to compare."""
        if not self.is_on:
            self._log(f"Nothing was compiled: the run ended within its first {EAGER_STEPS} steps, which are eager.")
            return
        if not self._told:
            self._log(f"{self._facts()} Too few steps to say what it brings.")
        elif self.num_compilations > self._num_told:
            self._log(self._facts())
        import torch
        from torch._dynamo.callback import callback_handler

        callback_handler.remove_start_callback(self._begin)
        callback_handler.remove_end_callback(self._end)
        self._module._compiled_call_impl = None
        # The cache belongs to the process and would keep the pools of captured graphs.
        torch.compiler.reset()

    def _begin(self, told: Any) -> None:
        self._began_s = time.perf_counter()

    def _end(self, told: Any) -> None:
        self.num_compilations += 1
        self.compile_s += time.perf_counter() - self._began_s

    def _facts(self) -> str:
        return f"torch.compile: {self.num_compilations} compilations took {self.compile_s:.1f} s."

    def _tell(self, step: int, num_slots: int) -> None:
        self._told, self._num_told = True, self.num_compilations
        if not self._eager:
            self._log(f"{self._facts()} The eager steps were before the resume: nothing to compare with.")
            return
        before_s, after_s = (statistics.median(times) * num_slots for times in (self._eager, self._compiled))
        verdict = f"A step of {num_slots} token slots takes {after_s:.3f} s, eager {before_s:.3f} s:"
        if after_s >= before_s:
            self._log(f"{self._facts()} {verdict} it never pays off here. Set training.torch_compile=false.")
            return
        even = EAGER_STEPS + break_even_steps(self.compile_s, before_s, after_s)
        self._log(f"{self._facts()} {verdict} it has paid off after step {even}.", break_even_step=even)

    def _log(self, message: str, **facts: Any) -> None:
        data = {"num_compilations": self.num_compilations, "compile_s": round(self.compile_s, 3), **facts}
        self._publish(Event("log", {"message": message, "compile": data}))


def break_even_steps(compile_s: float, eager_step_s: float, compiled_step_s: float) -> int:
    """Return after how many compiled steps the time saved is the time that compiling took.

    Args:
        compile_s: Seconds spent compiling.
        eager_step_s: Seconds of a step without it.
        compiled_step_s: Seconds of a step with it; less than without.
    """
    return -int(-compile_s // (eager_step_s - compiled_step_s))
