"""What happens when memory runs out: the bill at that instant, and the facts that were new."""

from __future__ import annotations

import linecache
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..diagnose.finding import Finding, Fix
from ..diagnose.oom import OomEvidence, judge_oom
from ..observe.memory_look import known_tensors
from ..observe.storages import Birth, is_user_file
from .loop_hooks import StepFacts

if TYPE_CHECKING:
    from .watching import Watch


def existing_tensors(model: nn.Module | None, optimizer: Any) -> list[Tensor]:
    """Return what is on the device before a loop begins."""
    return known_tensors(model, optimizer)


def explain_oom(watch: Watch, error: BaseException, facts: StepFacts) -> Finding:
    """Return the finding for an out-of-memory error that left a watched loop."""
    failure = watch.tracker.failure if watch.tracker is not None else None
    functions, line, module = _places(error.__traceback__, watch.model)
    phase = failure.phase if failure is not None else watch.hooks.phase
    if watch.hooks.phase in ("optimizer", "evaluation"):
        phase = watch.hooks.phase
    micro = facts.micro_batches[-1] if facts.micro_batches else None
    mask = micro.kwargs.get("attention_mask") if micro is not None else None
    row_tokens: list[int] = []
    if isinstance(mask, Tensor) and mask.ndim == 2:
        row_tokens = [int(value) for value in mask.sum(1)]
    elif micro is not None and micro.num_rows:
        row_tokens = [micro.num_tokens // micro.num_rows] * micro.num_rows
    bill, logits, shape = _bill(watch)
    state_bytes = sum(
        value.untyped_storage().nbytes()
        for state in getattr(watch.optimizer, "state", {}).values()
        for value in (state.values() if isinstance(state, dict) else ())
        if isinstance(value, Tensor)
    )
    expected = 2 * sum(p.numel() * p.element_size() for p in watch.hooks.trained())
    return judge_oom(
        OomEvidence(
            step=watch.num_steps,
            phase=phase,
            op=failure.op if failure is not None else "",
            module=failure.module if failure is not None and failure.module else module,
            line=failure.line if failure is not None and failure.line else line,
            requested_bytes=failure.num_bytes if failure is not None else 0,
            limit_bytes=watch.limit_bytes or _device_bytes(),
            bill=bill,
            logits_bytes=logits,
            logits_shape=shape,
            num_tokens=sum(item.num_tokens for item in facts.micro_batches[-1:]),
            num_rows=micro.num_rows if micro is not None else 0,
            row_tokens=row_tokens,
            earlier_tokens=_per_micro_batch(watch),
            earlier_row_tokens=list(watch.record.row_tokens),
            max_length=watch.max_length,
            state_is_new=watch.num_steps <= 1,
            state_bytes=max(state_bytes, expected) if phase == "optimizer" else state_bytes or expected,
            optimizer_name=type(watch.optimizer).__name__,
            functions=functions,
            fixes=_fixes(micro.num_rows if micro is not None else 0, phase),
        )
    )


def _fixes(num_rows: int, phase: str) -> list[Fix]:
    """Return settings ranked by what they cost; the effective batch stays, and evaluation is set by itself."""
    if phase == "evaluation":
        half = max(1, num_rows // 2)
        return [Fix(f"Set per_device_eval_batch_size={half}; training stays as it is.",
                    {"evaluation.per_device_eval_batch_size": half})]  # fmt: skip
    if phase in ("forward", "backward", "loss", "between") and num_rows > 1:
        half = max(1, num_rows // 2)
        return [
            Fix(
                f"Set per_device_train_batch_size={half} and double gradient_accumulation_steps: same effective batch; "
                "divide the loss by the tokens of the whole step.",
                {"training.per_device_train_batch_size": half},
            )
        ]
    return []


def _per_micro_batch(watch: Watch) -> list[int]:
    pairs = zip(watch.record.tokens, watch.record.rows, strict=True)
    return [tokens // max(1, count) for tokens, (_, count) in pairs]


def _bill(watch: Watch) -> tuple[dict[str, int], int, tuple[int, ...]]:
    """Return bytes by category at the failure, bytes of logits, and the shape of the largest."""
    tracker = watch.tracker
    bill: Counter[str] = Counter()
    if tracker is None:
        return _allocator_bill(watch), 0, ()
    parameters = {_key(p) for p in watch.model.parameters()} if watch.model is not None else set()
    state = {
        _key(value)
        for item in getattr(watch.optimizer, "state", {}).values()
        for value in (item.values() if isinstance(item, dict) else ())
        if isinstance(value, Tensor)
    }
    gradients = (
        {_key(p.grad) for p in watch.model.parameters() if p.grad is not None} if watch.model is not None else set()
    )
    vocabulary = getattr(getattr(watch.model, "config", None), "vocab_size", 0)
    for key, num_bytes in tracker.keys_at_failure.items():
        name = (
            "parameter" if key in parameters else "optimizer_state" if key in state
            else "gradient" if key in gradients else "activation"
        )  # fmt: skip
        bill[name] += num_bytes
    # A gradient of the vocabulary's matrix has the vocabulary in front, logits have it last.
    births = [birth for birth in tracker.live_at_failure if birth.shape and birth.shape[-1] == vocabulary > 0]
    largest = max(births, key=_size, default=None)
    return dict(bill), sum(birth.num_bytes for birth in births), largest.shape if largest is not None else ()


def _size(birth: Birth) -> int:
    return birth.num_bytes


def _allocator_bill(watch: Watch) -> dict[str, int]:
    """Return the bill without a tracker: what the model and optimizer hold, and the rest of the allocator's peak."""
    if watch.model is None:
        return {}
    weights = sum(p.numel() * p.element_size() for p in watch.model.parameters())
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in watch.model.parameters() if p.grad is not None)
    bill = {"parameter": weights, "gradient": gradients}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated()
        bill["activation"] = max(0, peak - weights - gradients)
        bill["cached"] = max(0, torch.cuda.max_memory_reserved() - peak)
    return bill


def _device_bytes() -> int:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.mem_get_info()[1])
    return 0


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _places(traceback: TracebackType | None, model: nn.Module | None) -> tuple[list[str], str, str]:
    """Return function names, the innermost user line and the innermost module of a traceback."""
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    functions, line, module = [], "", ""
    while traceback is not None:
        frame = traceback.tb_frame
        functions.append(frame.f_code.co_name)
        if is_user_file(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{traceback.tb_lineno}"
            text = linecache.getline(frame.f_code.co_filename, traceback.tb_lineno)
            # What is passed to load_state_dict is made on its line before it is entered.
            functions += [name for name in ("load_state_dict", "save_pretrained", "state_dict") if f"{name}(" in text]
        module = names.get(id(frame.f_locals.get("self")), module)
        traceback = traceback.tb_next
    return functions, line, module
