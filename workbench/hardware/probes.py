"""What is timed to know a CPU: products by shape and layout, operators by size, attention, dequantisation, overhead.

Each probe returns points: coordinates and a rate. A time estimate looks them up between the points, see ``curves.py``.
Nothing here knows a model: an operator is called with plain tensors, the way a training step calls it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .curves import Points as Points

if TYPE_CHECKING:
    import torch

Clock = Callable[[], float]

# Sides of the products that are measured, in all combinations; between them a rate changes little.
PRODUCT_SIDES = {"float32": (16, 64, 256, 1024), "bfloat16": (16, 128, 512)}
# Rows, inner side and columns of a product with a packed 4-bit weight.
PACKED_SIDES = ((16, 256), (256, 1024), (256, 1024))
# Bytes of one operand of an operator.
OPERAND_BYTES = (2**14, 2**18, 2**22)
# From this size on the C library maps fresh pages for every result, which costs more than the kernel. Only logits and
# gradients of whole vocabularies are so large; the operators that work on those are measured at it.
FRESH_BYTES = 2**25
OF_LOGITS = frozenset(
    (
        "mul",
        "mul_",
        "add",
        "add_",
        "div",
        "sqrt",
        "clone",
        "cat",
        "_log_softmax",
        "_log_softmax_backward_data",
        "nll_loss_backward",
        "embedding_dense_backward",
        "_fused_adamw_",
        "_to_copy.float32",
        "_to_copy.bfloat16",
    )
)
# Operands and results that a probe goes round; more than a last-level cache shared with others usually leaves.
RING_BYTES = 2**24
MAX_RING = 64
# What calling an operator costs without work is measured at this many elements, and subtracted.
SMALL = 32
ROW = 512
# (length, head size) of attention.
LENGTHS, HEAD_SIZES = (64, 256, 1024), (16, 64)
# Longest single call that is repeated; what takes longer is known well enough from one.
LONG_S = 0.1


def process_clock(num_threads: int) -> Clock:
    """Return the clock to measure with: with one thread the process's own time, which other programs do not lengthen.

    Args:
        num_threads: Threads torch computes with.
    """
    return time.process_time if num_threads == 1 else time.perf_counter


def shortest(work: Callable[[], object], clock: Clock, seconds: float) -> float:
    """Return the shortest time of one call in seconds, from calls repeated for ``seconds``; the first does not count.

    Calls that are too short for the clock are timed in bunches.
    """
    began = clock()
    work()
    first = clock() - began
    if first > LONG_S:
        return first
    bunch = max(1, round(2e-4 / max(first, 1e-6)))
    best, deadline = float("inf"), clock() + seconds
    while best == float("inf") or clock() < deadline:
        began = clock()
        for _ in range(bunch):
            work()
        best = min(best, (clock() - began) / bunch)
    return max(best, 1e-9)


def settle_heap() -> None:
    """Bring the C library's heap into the state that a training run soon brings it to.

    glibc maps fresh pages for every block above a threshold that rises to the largest such block that was freed, up to
    32 MiB. The first large activation that dies raises it for good.
    """
    import torch

    torch.empty(FRESH_BYTES - 2**16, dtype=torch.uint8)


def product_points(dtype: torch.dtype, layout: str, clock: Clock, seconds: float, sides: Iterable[int] = ()) -> Points:
    """Return ``(rows, inner, columns, operations per second)`` of matrix products.

    Args:
        dtype: Of both operands.
        layout: ``"nn"``, ``"nt"`` or ``"tn"``: which operand lies transposed in memory. A linear layer's forward is
            ``nt``, its gradient for the input ``nn``, for the weight ``tn``.
        clock: See ``process_clock``.
        seconds: For each shape.
        sides: Lengths of the sides, in all combinations; empty takes PRODUCT_SIDES.
    """
    import torch

    chosen = tuple(sides) or PRODUCT_SIDES[str(dtype)[6:]]
    points: Points = []
    for rows, inner, columns in itertools.product(chosen, repeat=3):
        left = torch.ones(inner, rows, dtype=dtype).t() if layout[0] == "t" else torch.ones(rows, inner, dtype=dtype)
        right = (
            torch.ones(columns, inner, dtype=dtype).t() if layout[1] == "t" else torch.ones(inner, columns, dtype=dtype)
        )
        taken = shortest(lambda left=left, right=right: torch.mm(left, right), clock, seconds)  # type: ignore[misc]  # bound now
        points.append((float(rows), float(inner), float(columns), 2 * rows * inner * columns / taken))
    return points


def operator_points(name: str, clock: Clock, seconds: float) -> Points:
    """Return ``(bytes moved, bytes per second)`` of one of OPERATORS, the cost of the bare call subtracted.

    A step makes each result in another place than the last one, so the calls go round several sets of operands and
    results, RING_BYTES in all: what a kernel reaches when everything lies in the cache is never seen in training.

    Args:
        name: Key of OPERATORS.
        clock: See ``process_clock``.
        seconds: For each size.
    """
    import torch

    with torch.no_grad():
        bare = _operator_s(name, SMALL, clock, seconds, ring_bytes=0)[0]
        points: Points = []
        for size in (*OPERAND_BYTES, FRESH_BYTES) if name in OF_LOGITS else OPERAND_BYTES:
            taken, moved = _operator_s(name, size // 4, clock, seconds, ring_bytes=RING_BYTES)
            points.append((float(moved), moved / max(taken - bare, 0.05 * taken)))
    return points


def _operator_s(name: str, num_elements: int, clock: Clock, seconds: float, *, ring_bytes: int) -> tuple[float, int]:
    """Return the seconds of a call on operands of ``num_elements``, and the bytes it moves."""
    import torch

    row = min(ROW, num_elements)

    def operands() -> tuple[Any, tuple[Any, ...]]:
        return OPERATORS[name](torch.ones(num_elements // row, row))

    sets = [operands()]
    function, args = sets[0]
    moved = _bytes_of(args) + _bytes_of(function(*args))
    sets += [operands() for _ in range(min(MAX_RING, ring_bytes // moved))]
    results: list[object] = [None] * len(sets)
    turn = 0

    def call() -> None:
        nonlocal turn
        turn = (turn + 1) % len(sets)
        results[turn] = None
        function, args = sets[turn]
        results[turn] = function(*args)

    for _ in sets:  # The first results fault their pages in.
        call()
    return shortest(call, clock, seconds), moved


def attention_points(is_backward: bool, dtype: torch.dtype, clock: Clock, seconds: float) -> Points:
    """Return ``(length, head size, operations per second)`` of the CPU's fused attention, causal.

    Operations are two products over all pairs, half of them when causal, and 2.5 times that in backward.
    """
    import torch

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    points: Points = []
    for length, size in itertools.product(LENGTHS, HEAD_SIZES):
        heads = 4
        query = torch.ones(1, heads, length, size, dtype=dtype)
        flops = 2.0 * heads * length * length * size
        output, sums = forward(query, query, query, 0.0, True)
        work: Callable[[], object] = lambda query=query: forward(query, query, query, 0.0, True)  # type: ignore[misc]  # noqa: E731  # bound now
        if is_backward:
            flops *= 2.5
            args = (output, query, query, query, output, sums, 0.0, True)
            work = lambda args=args: backward(*args)  # type: ignore[misc]  # noqa: E731  # bound now
        points.append((float(length), float(size), flops / shortest(work, clock, seconds)))
    return points


def packed_points(clock: Clock, seconds: float) -> Points:
    """Return ``(rows, inner, columns, operations per second)`` of products with a packed 4-bit weight.

    Empty without bitsandbytes.
    """
    import torch

    try:
        import bitsandbytes
        from bitsandbytes import functional
    except ImportError:
        return []
    points: Points = []
    for rows, inner, columns in itertools.product(*PACKED_SIDES):
        packed, state = functional.quantize_4bit(torch.ones(columns, inner), quant_type="nf4")
        value = torch.ones(rows, inner, requires_grad=True)
        taken = shortest(
            lambda value=value, packed=packed, state=state: bitsandbytes.matmul_4bit(value, packed.t(), state),  # type: ignore[misc]  # bound now
            clock,
            seconds,
        )
        points.append((float(rows), float(inner), float(columns), 2 * rows * inner * columns / taken))
    return points


def dequantize_points(clock: Clock, seconds: float) -> Points:
    """Return ``(bytes moved, bytes per second)`` of unpacking 4-bit weights: packed bytes read, float32 written.

    Empty without bitsandbytes.
    """
    import torch

    try:
        from bitsandbytes import functional
    except ImportError:
        return []
    points: Points = []
    for side in (256, 1024):
        packed, state = functional.quantize_4bit(torch.ones(side, side), quant_type="nf4")
        moved = packed.numel() + 4 * side * side
        taken = shortest(lambda packed=packed, state=state: functional.dequantize_4bit(packed, state), clock, seconds)  # type: ignore[misc]  # bound now
        points.append((float(moved), moved / taken))
    return points


def eight_bit_points(clock: Clock, seconds: float) -> Points:
    """Return ``(bytes moved, bytes per second)`` of bitsandbytes' 8-bit AdamW on one parameter; empty without it."""
    import torch

    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        return []
    points: Points = []
    for num_elements in (2**14, 2**20):
        parameter = torch.nn.Parameter(torch.ones(num_elements))
        parameter.grad = torch.ones(num_elements)
        optimizer = AdamW8bit([parameter])
        moved = 10 * num_elements  # parameter and gradient in float32, two moments in 8 bits
        points.append((float(moved), moved / shortest(optimizer.step, clock, seconds)))
    return points


def _bytes_of(values: Any) -> int:
    """Return bytes as ``estimate/work.py`` counts them: every tensor among arguments and results."""
    import torch

    if isinstance(values, torch.Tensor):
        return values.numel() * values.itemsize
    return sum(_bytes_of(value) for value in values) if isinstance(values, (tuple, list)) else 0


def _aten(name: str) -> Any:
    import torch

    return getattr(torch.ops.aten, name)


def _plain(name: str, *extra: object) -> Callable[[Any], tuple[Any, tuple[Any, ...]]]:
    return lambda x: (_aten(name), (x, *extra))


def _two(name: str, *extra: object) -> Callable[[Any], tuple[Any, tuple[Any, ...]]]:
    return lambda x: (_aten(name), (x, x.clone(), *extra))


def _softmax_backward(name: str) -> Callable[[Any], tuple[Any, tuple[Any, ...]]]:
    return lambda x: (_aten(name), (x, x.clone(), -1, x.dtype))


def _strided_clone(x: Any) -> tuple[Any, tuple[Any, ...]]:
    import torch

    groups = max(1, x.shape[1] // 64)
    heads = x.view(x.shape[0], groups, -1).transpose(0, 1)
    return lambda value: torch.clone(value, memory_format=torch.contiguous_format), (heads,)


def _norm_backward(x: Any) -> tuple[Any, tuple[Any, ...]]:
    import torch

    width = x.shape[1]
    _, mean, scale = torch.native_layer_norm(x, [width], None, None, 1e-5)
    weight = torch.ones(width)
    return _aten("native_layer_norm_backward"), (x, x.clone(), [width], mean, scale, weight, weight, [True] * 3)


def _norm(x: Any) -> tuple[Any, tuple[Any, ...]]:
    import torch

    weight = torch.ones(x.shape[1])
    return _aten("native_layer_norm"), (x, [x.shape[1]], weight, weight, 1e-5)


def _adamw(x: Any) -> tuple[Any, tuple[Any, ...]]:
    import torch

    lists = [[x], [x.clone()], [x.clone()], [x.clone()]]
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    steps = [torch.ones(())]

    def step(*tensors: Any) -> None:
        _aten("_fused_adamw_")(*tensors, [], steps, amsgrad=False, maximize=False, **settings)

    return step, tuple(lists)


def _nll_backward(x: Any) -> tuple[Any, tuple[Any, ...]]:
    import torch

    targets = torch.zeros(x.shape[0], dtype=torch.int64)
    one = torch.ones(())
    return _aten("nll_loss_backward"), (one, x, targets, None, 1, -100, one)


def _embedding_backward(x: Any) -> tuple[Any, tuple[Any, ...]]:
    import torch

    rows = torch.arange(x.shape[0])
    return _aten("embedding_dense_backward"), (x, rows, 2 * x.shape[0], -1, False)


def _slice_backward(x: Any) -> tuple[Any, tuple[Any, ...]]:
    return _aten("slice_backward"), (x, [x.shape[0], 2 * x.shape[1]], 1, 0, x.shape[1], 1)


def _to(dtype_name: str) -> Callable[[Any], tuple[Any, tuple[Any, ...]]]:
    def make(x: Any) -> tuple[Any, tuple[Any, ...]]:
        import torch

        source = x.to(getattr(torch, dtype_name))
        target = torch.bfloat16 if source.dtype == torch.float32 else torch.float32
        return lambda value: value.to(target), (source,)

    return make


# What is timed under the name of each operator: a function of a float32 tensor that returns what to call. Operators
# that are not here take the rate of ``mul``, those that write in place that of ``mul_``.
OPERATORS: dict[str, Callable[[Any], tuple[Any, tuple[Any, ...]]]] = {
    "mul": _two("mul"),
    "mul_": _two("mul_"),
    "add": _two("add"),
    "add_": _two("add_"),
    "div": _two("div"),
    "addcmul_": lambda x: (_aten("addcmul_"), (x, x.clone(), x.clone())),
    "addcdiv_": lambda x: (_aten("addcdiv_"), (x, x.clone(), x.clone())),
    "lerp_": _two("lerp_", 0.1),
    "pow": _plain("pow", 2),
    "sqrt": _plain("sqrt"),
    "tanh": _plain("tanh"),
    "silu": _plain("silu"),
    "silu_backward": _two("silu_backward"),
    "gelu": _plain("gelu"),
    "gelu_backward": _two("gelu_backward"),
    "bernoulli_": _plain("bernoulli_", 0.9),
    "_softmax": _plain("_softmax", -1, False),
    "_safe_softmax": _plain("_safe_softmax", -1),
    "_softmax_backward_data": _softmax_backward("_softmax_backward_data"),
    "_log_softmax": _plain("_log_softmax", -1, False),
    "_log_softmax_backward_data": _softmax_backward("_log_softmax_backward_data"),
    "nll_loss_backward": _nll_backward,
    "sum": _plain("sum", [0]),
    "mean": _plain("mean", [-1], True),
    "native_layer_norm": _norm,
    "native_layer_norm_backward": _norm_backward,
    "clone": lambda x: (_aten("clone"), (x,)),
    "clone.strided": _strided_clone,
    "cat": lambda x: (_aten("cat"), ([x, x.clone()], -1)),
    "slice_backward": _slice_backward,
    "embedding_dense_backward": _embedding_backward,
    "linalg_vector_norm": _plain("linalg_vector_norm"),
    "_foreach_mul_": lambda x: (_aten("_foreach_mul_"), ([x], 1.0)),
    "_fused_adamw_": _adamw,
    "_to_copy.float32": _to("float32"),
    "_to_copy.bfloat16": _to("bfloat16"),
    "_to_copy.int8": _to("int8"),
}
