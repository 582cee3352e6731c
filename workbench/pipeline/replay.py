"""Runs the last step of a loop again, from the pre-step weights and the kept random state, and says where NaN begins.

The model's inputs are kept by the hooks. The loss of a plain loop is the loop's own code, which the hooks do not
see; so
the assignments that lead to the tensor on which ``.backward()`` was called are cut out of the loop's source and run
again in a copy of its variables. Statements that do something else (append, print, step) are left out.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..observe.finiteness import FinitenessMode
from ..observe.storages import tensors_in
from .loop_hooks import LoopHooks, MicroBatch

MAX_ROWS = 64  # Rows that are tried one by one.


@dataclass
class Rerun:
    """How to compute the loss again: ``loss_of(batch)`` with ``batch`` None for the kept one."""

    loss_of: Callable[[Any], Tensor]
    batch: Any


@dataclass
class ReplayResult:
    """What the replay showed."""

    mode: FinitenessMode
    is_finite: bool
    rows: list[int]
    num_rows: int


def replay(hooks: LoopHooks, rerun: Rerun, micro: MicroBatch | None) -> ReplayResult | None:
    """Run the step again under the finiteness mode, then row by row; None where the code cannot be run again."""
    model = hooks.model
    with quiet(hooks, micro):
        mode = FinitenessMode(model=model)
        try:
            with mode:
                loss = rerun.loss_of(None)
                if loss.requires_grad:
                    loss.backward()
        except Exception:  # The user's own code: whatever it raises, the doctor goes on with what it has.
            if not mode.created and mode.first_nan is None:
                return None
            loss = torch.tensor(float("nan"))
        finite = _is_finite(loss, hooks)
    rows, count = _bad_rows(hooks, rerun, micro) if not finite else ([], _num_rows(rerun.batch))
    return ReplayResult(mode, finite, rows, count)


def rerun_of_model(hooks: LoopHooks, micro: MicroBatch) -> Rerun | None:
    """Return how to run the model's own loss again, where it returns one."""
    if hooks.model is None or micro.loss is None:
        return None
    model = hooks.model

    def loss_of(batch: Any) -> Tensor:
        kwargs = micro.kwargs if batch is None else batch
        loss: Tensor = model(*micro.args, **kwargs).loss
        return loss

    return Rerun(loss_of, micro.kwargs)


def rerun_of_source(frame: FrameType, batch: Any) -> Rerun | None:
    """Return how to run the loop's own loss code again, or None where its source is not known or too involved."""
    # What carries no graph is taken as it is now, since the loop may have changed it in place; what does is made again.
    given = frozenset(name for name, value in frame.f_locals.items() if not _carries_graph(value))
    cut = cut_loss_code(frame, given)
    if cut is None:
        return None
    code, root = cut
    namespace = {**frame.f_globals, **frame.f_locals}
    parts = dict(batch.items()) if hasattr(batch, "items") else {}
    whole = [name for name, value in frame.f_locals.items() if value is batch and batch is not None]
    inner = {name: key for name, value in frame.f_locals.items() for key, item in parts.items() if value is item}

    def loss_of(other: Any) -> Tensor:
        local = dict(namespace)
        if other is not None:
            local.update(dict.fromkeys(whole, other))
            local.update({name: other[key] for name, key in inner.items()})
        exec(code, local)  # The user's own lines, run again as they are.
        value = eval(root, local)
        if not isinstance(value, Tensor):
            raise TypeError("the code did not yield a loss")
        return value

    return Rerun(loss_of, batch if whole or inner else None)


def _carries_graph(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(value))


def cut_loss_code(frame: FrameType, given: frozenset[str] = frozenset()) -> tuple[CodeType, CodeType] | None:
    """Return the assignments that lead to the loss, and the expression on which backward was called.

    Names in ``given`` are taken from the frame and not assigned again.
    """
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return None
    body = _enclosing_body(tree, frame.f_lineno)
    root, before = _loss_expression(body, frame.f_lineno)
    if root is None:
        return None
    needed = {node.id for node in ast.walk(root) if isinstance(node, ast.Name)}
    given = given - needed  # The loss itself is always made again, also where it was returned detached.
    kept: list[ast.stmt] = []
    for statement in reversed(before):
        written = _written(statement)
        if not written & (needed - given) or _advances_iterator(statement):
            continue
        kept.append(statement)
        needed |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    module = ast.Module(body=list(reversed(kept)), type_ignores=[])
    filename = frame.f_code.co_filename
    return compile(module, filename, "exec"), compile(ast.Expression(root), filename, "eval")


def _enclosing_body(tree: ast.AST, line: int) -> list[ast.stmt]:
    """Return the statements of the innermost loop or function around a line."""
    best: list[ast.stmt] = getattr(tree, "body", [])
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.While, ast.FunctionDef)) and node.lineno <= line <= (node.end_lineno or 0):
            inner = node.body
            if inner and inner[0].lineno <= line and inner[0].lineno >= best[0].lineno:
                best = inner
    return best


def _loss_expression(body: list[ast.stmt], line: int) -> tuple[ast.expr | None, list[ast.stmt]]:
    """Return the expression whose ``.backward()`` is called before a line, else the ``loss=`` of the call on it."""
    for index in range(len(body) - 1, -1, -1):
        statement = body[index]
        if statement.lineno > line:
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
                if isinstance(node.func.value, ast.Name) and node.func.value.id == "accelerator" and node.args:
                    return node.args[0], body[:index]
                return node.func.value, body[:index]
    for index, statement in enumerate(body):
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            for node in ast.walk(statement):
                if isinstance(node, ast.keyword) and node.arg == "loss":
                    return node.value, body[:index]
    return None, []


def _written(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _advances_iterator(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next"
        for node in ast.walk(statement)
    )


@contextlib.contextmanager
def quiet(hooks: LoopHooks, micro: MicroBatch | None) -> Iterator[None]:
    """Restore gradients, random state and the hooks' notes after a replay."""
    parameters = list(hooks.model.parameters()) if hooks.model is not None else hooks.trained()
    kept = [(parameter, parameter.grad) for parameter in parameters]
    state, device_state = torch.get_rng_state(), None
    if micro is not None:
        torch.set_rng_state(micro.rng_state)
        if micro.cuda_rng_state is not None:
            device_state = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(micro.cuda_rng_state)
    for parameter in parameters:
        parameter.grad = None
    hooks.is_replaying = True
    try:
        yield
    finally:
        hooks.is_replaying = False
        for parameter, gradient in kept:
            parameter.grad = gradient
        torch.set_rng_state(state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)


def _is_finite(loss: Tensor, hooks: LoopHooks) -> bool:
    if not bool(torch.isfinite(loss.detach()).all()):
        return False
    parameters = hooks.model.parameters() if hooks.model is not None else hooks.trained()
    return all(bool(torch.isfinite(p.grad).all()) for p in parameters if p.grad is not None)


def _num_rows(batch: Any) -> int:
    sizes = {value.shape[0] for value in _tensors(batch) if value.ndim}
    return sizes.pop() if len(sizes) == 1 else 0


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if hasattr(batch, "items"):
        return [value for _, value in batch.items() if isinstance(value, Tensor)]
    return []


def take_row(batch: Any, row: int) -> Any:
    """Return one row of a tensor or of a mapping of tensors."""
    if isinstance(batch, Tensor):
        return batch[row : row + 1]
    return {name: value[row : row + 1] if isinstance(value, Tensor) and value.ndim else value
            for name, value in batch.items()}  # fmt: skip


def _bad_rows(hooks: LoopHooks, rerun: Rerun, micro: MicroBatch | None) -> tuple[list[int], int]:
    """Return the rows that are not finite by themselves, forward and backward; empty when all or none are."""
    count = _num_rows(rerun.batch)
    if not 1 < count <= MAX_ROWS:
        return [], count
    bad = []
    for row in range(count):
        with quiet(hooks, micro):
            try:
                loss = rerun.loss_of(take_row(rerun.batch, row))
                if loss.requires_grad:
                    loss.backward()
                if not _is_finite(loss, hooks):
                    bad.append(row)
            except Exception:  # The user's own code on a single row.
                return [], count
    return (bad if len(bad) < count else []), count


def inputs_of(micro: MicroBatch | None) -> dict[str, Tensor]:
    """Return the tensors of a kept forward pass by name."""
    if micro is None:
        return {}
    named = {name: value for name, value in micro.kwargs.items() if isinstance(value, Tensor)}
    return named | {f"args[{i}]": value for i, value in enumerate(micro.args) if isinstance(value, Tensor)}


def embedding_of(model: nn.Module | None) -> Tensor | None:
    """Return the input embedding's weight, or None."""
    getter = getattr(model, "get_input_embeddings", None)
    try:
        layer = getter() if getter is not None else None
    except (NotImplementedError, AttributeError):
        return None
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, Tensor) else None
