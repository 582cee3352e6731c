"""What it costs to reach an operator: Python's modules, the dispatcher, autograd. Measured on a model that is all cost.

A decoder of transformers with a handful of numbers in each tensor computes next to nothing; what its passes take is
overhead, and divided by the operators that do work it is the overhead of one. Views have no work and are so carried by
the others, as in any model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .probes import Clock, shortest

# Parameters of the optimizer probe, as many as a small adapter has.
NUM_PARAMETERS = 24


def overhead_s(clock: Clock, seconds: float, kind: str = "cpu") -> dict[str, float]:
    """Return the seconds of reaching one operator in ``"forward"``, ``"backward"`` and ``"optimizer"``.

    Args:
        clock: See ``probes.process_clock``.
        seconds: For each of the three.
        kind: ``"cuda"`` measures what this host takes to keep a GPU busy, its launches included.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=8, num_hidden_layers=4, use_cache=False, **sizes)
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config).train().to(kind)
    tokens = torch.zeros(1, 4, dtype=torch.int64, device=kind)

    def finished(work: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            work()
            torch.cuda.synchronize()

        return run if kind == "cuda" else work

    def forward() -> Any:
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    forward().backward()  # Gradients exist from here on, so that the next passes add to them.
    forward_s = shortest(finished(forward), clock, seconds)
    both_s = shortest(finished(lambda: forward().backward()), clock, seconds)
    num_forward = count_operators(forward)
    num_both = count_operators(lambda: forward().backward())
    parameters = [torch.nn.Parameter(torch.ones(8, device=kind)) for _ in range(NUM_PARAMETERS)]
    for parameter in parameters:
        parameter.grad = torch.ones(8, device=kind)
    optimizer = torch.optim.AdamW(parameters, foreach=False, fused=False)
    step_s = shortest(finished(optimizer.step), clock, seconds)
    return {
        "forward": forward_s / num_forward,
        "backward": max(both_s - forward_s, 0.1 * both_s) / (num_both - num_forward),
        "optimizer": step_s / count_operators(optimizer.step),
    }


def count_operators(work: Callable[[], object]) -> int:
    """Return how many operators that read or write memory ``work`` calls; views and bare allocations do not count."""
    from torch.utils._python_dispatch import TorchDispatchMode

    count = 0

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal count
            count += _does_work(func)
            return func(*args, **(kwargs or {}))

    with Counter():  # type: ignore[no-untyped-call]  # torch has no types here
        work()
    return count


def _does_work(func: Any) -> bool:
    schema = func._schema
    name = schema.name.split("::")[-1]
    if name.startswith(("empty", "new_empty")) or name == "_unsafe_view":
        return False
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    return writes or not all(value.alias_info is not None for value in schema.returns)
