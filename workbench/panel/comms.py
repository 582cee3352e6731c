"""How the panel's buttons stay alive while a cell runs, on both generations of ipykernel."""

from __future__ import annotations

import contextlib
import json
from typing import Any


def answer_beside_cells(root: Any) -> None:
    """Let the messages of these widgets be handled while a cell runs.

    ipykernel 7.4 remembers for each comm which shell sent last on it and routes every message of the page back there,
    so that a button made in a cell waits for the cells. Without that hook the page's own choice counts, a subshell.

    Args:
        root: A widget; its children are walked.
    """
    for widget in walk_widgets(root):
        comm = getattr(widget, "comm", None)
        if comm is not None and hasattr(comm, "_reply_subshell_for"):
            comm._reply_subshell_for = None


def walk_widgets(root: Any) -> list[Any]:
    """Return a widget and everything below it, depth first."""
    found = [root]
    for child in getattr(root, "children", ()):
        found.extend(walk_widgets(child))
    return found


def pump_comm_messages() -> int:
    """Handle the page's waiting comm messages now, from inside a running cell; return how many.

    Needed on ipykernel 6 (Colab), which has no subshells: without it Pause and Stop would wait until ``wait()``
    returns. Cells that were queued meanwhile keep their order. Does nothing without a kernel or where it has subshells.
    """
    kernel = _kernel_with_queue()
    if kernel is None:
        return 0
    kernel.shell_stream.flush()  # moves what has arrived on the socket into the queue
    waiting = []
    while True:
        try:
            waiting.append(kernel.msg_queue.get_nowait())
        except Exception:
            break  # tornado's QueueEmpty; the class lives in different places over the versions
    handled = 0
    handled = 0
    cell = (kernel._parent_ident["shell"], kernel.get_parent("shell"))
    for entry in waiting:
        if _message_type(kernel, entry).startswith("comm_"):
            _run_now(entry)
            handled += 1
        else:
            kernel.msg_queue.put_nowait(entry)
    if handled:
        kernel.set_parent(*cell)  # what the running cell prints from here on belongs to it again
    return handled


def pump_while_waiting() -> None:
    """Make ``Session.wait`` handle the page's messages; doing it twice changes nothing."""
    from ..train.session import WAIT_HOOKS

    if pump_comm_messages not in WAIT_HOOKS:
        WAIT_HOOKS.append(pump_comm_messages)


def _kernel_with_queue() -> Any:
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    kernel = getattr(shell, "kernel", None)
    return kernel if hasattr(kernel, "msg_queue") and hasattr(kernel, "shell_stream") else None


def _message_type(kernel: Any, entry: Any) -> str:
    """Read the type without deserialising: that would mark the signature as seen and make the real handling fail."""
    try:
        frames = entry[-1][0]
        _, parts = kernel.session.feed_identities(frames, copy=False)
        return str(json.loads(bytes(parts[1].bytes if hasattr(parts[1], "bytes") else parts[1]))["msg_type"])
    except Exception:
        return ""


def _run_now(entry: Any) -> None:
    """Run a queued handler to its end; comm handlers never wait for anything, so one push is enough."""
    dispatch, arguments = entry[-2], entry[-1]
    coroutine = dispatch(*arguments)
    with contextlib.suppress(StopIteration):
        while True:
            coroutine.send(None)
