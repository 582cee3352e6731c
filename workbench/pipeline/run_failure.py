"""Why a run of the workbench ran out of memory: read from the traceback and the meter before anything is freed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..diagnose.oom import OomEvidence
from ..events import Meter
from ..hardware import Device
from ..units import parse_bytes

if TYPE_CHECKING:
    from ..train.build import Run
    from ..train.engine import Engine

# Function of ours or of a library in the traceback -> phase; the first line that matches decides.
_PHASES: tuple[tuple[str, frozenset[str]], ...] = (
    ("resume", frozenset({"_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "load_weights"})),
    ("save", frozenset({"save_checkpoint", "save_weights", "_save_result"})),
    ("evaluation", frozenset({"evaluate"})),
    ("backward", frozenset({"backward"})),
)
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(GiB|MiB|KiB|bytes)", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """Where in a run an exception came from.

    Attributes:
        phase: As in ``OomEvidence``.
        functions: Names of the functions of the traceback, outermost first.
        module: Innermost module whose forward ran; empty where none did.
        operator: Function that was called last, for devices that do not name the operator.
        batch: The micro-batch in work, or None.
    """

    phase: str
    functions: tuple[str, ...]
    module: str
    operator: str
    batch: Mapping[str, Any] | None


def read_place(traceback: TracebackType | None, model: nn.Module | None, *, is_built: bool) -> Place:
    """Return where an exception came from; ``is_built`` tells whether the run's parts existed."""
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    functions: list[str] = []
    module, batch, in_optimizer, after_model = "", None, False, False
    frame: FrameType | None = None
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        code = frame.f_code
        functions.append(code.co_name)
        if code.co_name in ("training_step", "evaluate") and _is_ours(code.co_filename):
            batch = frame.f_locals.get("batch", frame.f_locals.get("inputs"))
        folders = PurePath(code.co_filename).parts
        in_optimizer |= code.co_name == "step" and ("optim" in folders or "bitsandbytes" in folders)
        if code.co_name == "compute_loss":
            after_model = True
        inner = names.get(id(frame.f_locals.get("self")))
        if inner:
            module, after_model = inner, False
    phase = _phase_of(set(functions), in_optimizer, after_model, is_built)
    return Place(phase, tuple(functions), module, functions[-1] if functions else "", batch)


def _phase_of(functions: set[str], in_optimizer: bool, after_model: bool, is_built: bool) -> str:
    if not is_built:
        return "load"
    for phase, names in _PHASES:
        if functions & names:
            return phase
    if in_optimizer:
        return "optimizer"
    if functions & {"_clip_grad_norm", "_get_grad_norm"}:
        return "clipping"
    if "micro_step" in functions:
        return "loss" if after_model else "forward"
    return "between"


def _is_ours(filename: str) -> bool:
    return PurePath(filename).parts[-3:-1] == ("workbench", "train")


def look_at_oom(
    error: BaseException, run: Run | None, engine: Engine | None, device: Device, meter: Meter, *, evaluated: bool
) -> OomEvidence:
    """Return what is known at an out-of-memory error of a Session, while its frames still hold everything.

    Args:
        error: What was raised.
        run: What was built; None where it failed before.
        engine: The loop; None where it failed before.
        device: The device that was full: this machine's, or the emulated one.
        meter: What measures the run.
        evaluated: Whether an evaluation has ended before.
    """
    model = run.model if run is not None else None
    optimizer = run.optimizer if run is not None else None
    place = read_place(error.__traceback__, model, is_built=engine is not None)
    failure = getattr(meter, "failure", None)
    bill, cached, other = _bill(model, optimizer, place.batch, device, failure)
    module = place.module
    if failure is not None and failure.parameter is not None and model is not None:
        owner = next((name for name, value in model.named_parameters() if id(value) == failure.parameter), "")
        module = owner.rpartition(".")[0] or module
    ids = place.batch.get("input_ids") if isinstance(place.batch, Mapping) else None
    shape = tuple(ids.shape) if isinstance(ids, Tensor) else (0, 0)
    requested = failure.num_bytes if failure is not None else _requested(str(error))
    logits, logits_shape = _logits(model, shape, failure)
    step = engine.state.global_step if engine is not None else 0
    first_step = engine.first_step if engine is not None else 0
    state_bytes = bill.get("optimizer_state", 0)
    return OomEvidence(
        step=step,
        phase=place.phase,
        op=failure.operator if failure is not None else place.operator,
        node=failure.node if failure is not None else "",
        module=module,
        requested_bytes=requested,
        limit_bytes=device.capacity_bytes,
        bill=bill,
        logits_bytes=logits,
        logits_shape=logits_shape,
        num_tokens=shape[0] * shape[1],
        num_rows=shape[0],
        row_tokens=_row_tokens(place.batch),
        earlier_tokens=[engine.most_slots] if engine is not None and engine.most_slots else [],
        max_length=run.recipe.data.max_length if run is not None else None,
        state_is_new=step <= first_step + 1,
        state_bytes=state_bytes if place.phase != "optimizer" else max(state_bytes, _expected_state(optimizer)),
        optimizer_name=type(optimizer).__name__ if optimizer is not None else "optimizer",
        functions=place.functions,
        is_first_evaluation=place.phase == "evaluation" and not evaluated,
        cached_bytes=cached,
        other_bytes=other,
    )


def _bill(
    model: nn.Module | None, optimizer: Any, batch: Mapping[str, Any] | None, device: Device, failure: Any
) -> tuple[dict[str, int], int, int]:
    """Return bytes by category with what was reserved and free, and what other processes hold."""
    owned = _owned(model, optimizer, batch)
    bill: Counter[str] = Counter()
    if failure is not None:
        for key, num_bytes in failure.sizes.items():
            bill[owned.get(key, ("activation", 0))[0]] += num_bytes
        bill["workspace"] = max(0, failure.stats.allocated - sum(bill.values()))
        cached = max(0, failure.stats.reserved - failure.stats.allocated)
        bill |= {"cached": cached, "context": device.context_bytes}
        return {name: size for name, size in bill.items() if size}, cached, 0
    for name, num_bytes in owned.values():
        bill[name] += num_bytes
    if not (device.has_caching_allocator and torch.cuda.is_available()):
        return dict(bill), 0, 0
    # The unwinding has freed what only C++ held: the highest of this step is nearer to the instant of the failure.
    allocated = max(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
    reserved = max(torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved())
    bill["activation"] += max(0, allocated - sum(bill.values()))
    cached = max(0, reserved - allocated)
    free, total = torch.cuda.mem_get_info()
    other = max(0, total - free - torch.cuda.memory_reserved() - device.context_bytes)
    bill |= {"cached": cached, "context": device.context_bytes}
    return {name: size for name, size in bill.items() if size}, cached, other


def _owned(model: nn.Module | None, optimizer: Any, batch: Mapping[str, Any] | None) -> dict[int, tuple[str, int]]:
    """Return category and bytes of every storage that the model, the optimizer or the batch holds."""
    found: dict[int, tuple[str, int]] = {}

    def add(name: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            found.setdefault(int(storage._cdata), (name, storage.nbytes()))

    if model is not None:
        for parameter in model.parameters():
            add("parameter", parameter)
            add("gradient", parameter.grad)
        for buffer in model.buffers():
            add("parameter", buffer)
    for state in getattr(optimizer, "state", {}).values():
        for value in state.values() if isinstance(state, dict) else ():
            add("optimizer_state", value)
    for value in (batch or {}).values():
        add("input", value)
    return found


def _logits(model: nn.Module | None, shape: tuple[int, ...], failure: Any) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of live storages that have the size of the logits or of a copy of them, and their shape."""
    config = getattr(model, "config", None)
    vocabulary = int(getattr(config, "vocab_size", 0) or 0)
    if failure is None or not vocabulary or not shape[0] * shape[1]:
        return 0, ()
    rows, length = shape[0], shape[1]
    sizes = {tokens * vocabulary * width for tokens in (rows * length, rows * (length - 1)) for width in (2, 4)}
    found = sum(num_bytes for num_bytes in failure.sizes.values() if num_bytes in sizes)
    return found, (rows, length, vocabulary)


def _row_tokens(batch: Mapping[str, Any] | None) -> list[int]:
    if batch is None:
        return []
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return [int(value) for value in mask.sum(1)]
    return [ids.shape[1]] * ids.shape[0] if isinstance(ids, Tensor) and ids.ndim == 2 else []


def _expected_state(optimizer: Any) -> int:
    """Return the bytes of two moments in the dtype of what trains."""
    groups = getattr(optimizer, "param_groups", ())
    return 2 * sum(p.numel() * p.element_size() for group in groups for p in group["params"] if p.requires_grad)


def _requested(message: str) -> int:
    """Return the bytes that were asked for, from the message of torch's allocator; 0 where it does not say."""
    match = _ASKED.search(message)
    if match is None:
        return 0
    number, unit = match.groups()
    return int(float(number)) if unit.lower() == "bytes" else parse_bytes(f"{number} {unit}")
