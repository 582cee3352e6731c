"""``release``: give back what an exception, a deleted model or the notebook's own history still holds.

Each action is measured by itself: weak references to every live storage are taken first, and what has died after the
action is what it freed. What stays is reported with the name that holds it.
"""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..diagnose.finding import Finding, make_finding
from ..observe.graph_nodes import live_tensors
from ..observe.holders import roots_of_frame, roots_of_namespace, roots_of_process
from ..train.teardown import chain_of, let_go
from ..units import format_bytes
from .left_over import MIN_REPORTED, find_idle_adapters, name_holders


@dataclass(frozen=True)
class Freed:
    """What one action freed."""

    action: str
    num_bytes: int


@dataclass
class ReleaseReport:
    """What was freed by what, and what is left with whom; prints itself.

    Attributes:
        freed: One entry per action that freed something.
        findings: Each thing that held or holds memory, with its cause.
        left_bytes: Bytes of tensors still alive.
    """

    freed: list[Freed] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    left_bytes: int = 0

    @property
    def freed_bytes(self) -> int:
        """Bytes freed in all."""
        return sum(entry.num_bytes for entry in self.freed)

    def __str__(self) -> str:
        lines = [f"Freed {format_bytes(self.freed_bytes)}" + (":" if self.freed else ".")]
        lines += [f"  {format_bytes(entry.num_bytes)} by {entry.action}" for entry in self.freed]
        lines.append(f"Still held: {format_bytes(self.left_bytes)} in tensors.")
        lines += [f"  {finding.summary}" for finding in self.findings]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            lines.append("Not held by Python: the CUDA context and library workspaces, which cannot be freed.")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def release(namespace: Mapping[str, Any] | None = None, *, clear_history: bool = True) -> ReleaseReport:
    """Free memory that nobody needs and say what holds the rest.

    Clears the last exception with its whole chain (also exceptions kept in variables), the interactive shell's stored
    traceback, displayed tensors in the output history, reference cycles, and the device's cache. Variables that hold
    models or tensors are named, never deleted.

    Args:
        namespace: Names to look through for holders; the caller's own variables where it is None.
        clear_history: Take tensors, modules and model outputs out of the notebook's output history.

    Returns:
        A report that prints itself.
    """
    caller = sys._getframe(1)
    roots = roots_of_namespace(namespace) if namespace is not None else roots_of_frame(caller)
    shell = _shell()
    if shell is not None and namespace is None:
        roots += roots_of_namespace(shell.user_ns)
    ledger = _Ledger()
    report = ReleaseReport()
    _collect_cycles(ledger, report)
    _clear_exceptions(ledger, report, shell)
    if clear_history:
        _clear_history(ledger, report, shell, namespace)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    idle = find_idle_adapters()
    report.left_bytes, holders = name_holders(roots + roots_of_process())
    report.findings += [idle, *holders] if idle is not None else holders
    del caller, roots
    return report


class _Ledger:
    """Which storages are alive, by weak reference, and how many bytes die between two looks."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        for tensor in live_tensors():
            try:
                storage = tensor.untyped_storage()
                self._alive[int(storage._cdata)] = (weakref.ref(storage), storage.nbytes())
            except (NotImplementedError, RuntimeError):
                continue

    def settle(self) -> int:
        """Return the bytes that died since the last call."""
        dead = [key for key, (ref, _) in self._alive.items() if ref() is None]
        return sum(self._alive.pop(key)[1] for key in dead)

    def measure(self, report: ReleaseReport, action: str, run: Callable[[], None]) -> int:
        """Run an action, collect, and note what it freed."""
        run()
        gc.collect()
        num_bytes = self.settle()
        if num_bytes:
            report.freed.append(Freed(action, num_bytes))
        return num_bytes


def _collect_cycles(ledger: _Ledger, report: ReleaseReport) -> None:
    suspects = _unreachable_modules()
    num_bytes = ledger.measure(report, "gc.collect(): reference cycles", lambda: None)
    if num_bytes >= MIN_REPORTED:
        path = f" ({suspects})" if suspects else ""
        report.findings.append(
            make_finding(
                "release.cycle",
                f"Dead objects waited for Python's garbage collector{path}: "
                f"{format_bytes(num_bytes)}; gc.collect() freed "
                "them.",
                where={"object": suspects},
                evidence={"freed_bytes": num_bytes},
            )
        )


def _unreachable_modules() -> str:
    """Return the class names of modules and trainers that only a cycle keeps, as far as a quick look can tell."""
    names: dict[str, int] = defaultdict(int)
    flags = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    garbage_before = len(gc.garbage)
    try:
        gc.collect()
        for value in gc.garbage[garbage_before:]:
            if isinstance(value, nn.Module) or "Trainer" in type(value).__name__:
                names[type(value).__name__] += 1
    finally:
        gc.set_debug(flags)
        del gc.garbage[garbage_before:]
    return ", ".join(f"{count} {name}" for name, count in list(names.items())[:4])


def _all_exceptions() -> list[BaseException]:
    current = sys.exc_info()[1]
    running = list(chain_of(current)) if current is not None else []
    return [
        value
        for value in gc.get_objects()
        if issubclass(type(value), BaseException)
        and value.__traceback__ is not None
        and not any(value is own for own in running)
    ]


def _clear_exceptions(ledger: _Ledger, report: ReleaseReport, shell: Any) -> None:
    errors = _all_exceptions()
    inner = {id(item) for error in errors for item in (error.__context__, error.__cause__) if item is not None}
    outer = [error for error in errors if id(error) not in inner]
    chained = [error for error in errors if id(error) in inner]
    if (last := getattr(sys, "last_value", None)) is not None and not any(last is error for error in errors):
        outer.append(last)
    for group, cause in ((outer, "release.exception"), (chained, "release.exception_chain")):
        for error in group:
            # The places are text, taken before the frames are cleared: a frame kept here would hold its locals.
            name, place = type(error).__name__, _place(error)
            num_bytes = ledger.measure(
                report,
                f"the frames of {name} ({place})",
                lambda error=error: let_go(error),  # type: ignore[misc]
            )
            if num_bytes >= MIN_REPORTED:
                text = "The last exception" if cause == "release.exception" else "The inner exception of a chain"
                report.findings.append(
                    make_finding(
                        cause,
                        f"{text} ({name}) kept {format_bytes(num_bytes)} alive through the frames of {place}.",
                        where={"object": name, "frame": place},
                        evidence={"freed_bytes": num_bytes},
                    )
                )
    del errors, outer, chained, group, last
    error = None  # type: ignore[assignment]  # the loop variable would keep the exception

    def clear_stored() -> None:
        for name in ("last_exc", "last_value", "last_traceback", "last_type"):
            if hasattr(sys, name):
                delattr(sys, name)
        printer = getattr(shell, "InteractiveTB", None)
        if printer is not None and hasattr(printer, "tb"):
            printer.tb = None

    num_bytes = ledger.measure(report, "sys.last_* and the shell's stored traceback", clear_stored)
    if num_bytes >= MIN_REPORTED:
        report.findings.append(
            make_finding(
                "release.exception",
                f"sys.last_value and the shell's traceback kept {format_bytes(num_bytes)} alive.",
                evidence={"freed_bytes": num_bytes},
            )
        )


def _place(error: BaseException) -> str:
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return " > ".join(names[-3:]) if names else "unknown"


def _shell() -> Any:
    """Return the running interactive shell, or None outside a notebook."""
    module = sys.modules.get("IPython")
    getter = getattr(module, "get_ipython", None)
    return getter() if getter is not None else None


def _clear_history(ledger: _Ledger, report: ReleaseReport, shell: Any, namespace: Mapping[str, Any] | None) -> None:
    names = shell.user_ns if shell is not None else namespace
    if names is None or not isinstance(names, dict):
        return
    history = names.get("Out", names.get("_oh"))
    if not isinstance(history, dict):
        return

    for number in [key for key, value in history.items() if _is_heavy(value)]:

        def forget(number: Any = number) -> None:
            value = history.pop(number, None)
            for name in ("_", "__", "___", f"_{number}"):
                if name in names and names[name] is value:
                    names[name] = ""
            printer = getattr(shell, "displayhook", None)
            for name in ("_", "__", "___"):
                if printer is not None and getattr(printer, name, None) is value:
                    setattr(printer, name, "")

        num_bytes = ledger.measure(report, f"Out[{number}]", forget)
        report.findings.append(
            make_finding(
                "release.output_history",
                f"Out[{number}] (and _{number}) held what cell {number} displayed: {format_bytes(num_bytes)}.",
                where={"object": f"Out[{number}]"},
                evidence={"freed_bytes": num_bytes},
            )
        )


def _is_heavy(value: Any) -> bool:
    if isinstance(value, (Tensor, nn.Module)):
        return True
    if isinstance(value, Mapping):
        return any(isinstance(item, Tensor) for item in value.values())
    return isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value)
