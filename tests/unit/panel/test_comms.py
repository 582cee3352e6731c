"""Buttons beside running cells: the hook of ipykernel 7.4, and the pump for kernels without subshells."""

from __future__ import annotations

import collections
import json
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.panel import comms
from workbench.train.session import WAIT_HOOKS


def widget(*children: Any, has_hook: bool = True) -> Any:
    hook = {"_reply_subshell_for": lambda data, default: default} if has_hook else {}
    return SimpleNamespace(children=children, comm=SimpleNamespace(**hook))


def test_all_widgets_of_a_tree_lose_the_hook() -> None:
    old_kernel = widget(has_hook=False)  # ipykernel 6 and 7.0 to 7.3 have no such hook
    button = widget()
    tree = widget(widget(button, old_kernel))
    assert len(comms.walk_widgets(tree)) == 4
    comms.answer_beside_cells(tree)
    for one in (tree, tree.children[0], button):
        assert one.comm._reply_subshell_for is None
    assert not hasattr(old_kernel.comm, "_reply_subshell_for")


class Queue:
    """The part of tornado's queue that the pump uses."""

    def __init__(self) -> None:
        self.entries: collections.deque[Any] = collections.deque()

    def get_nowait(self) -> Any:
        if not self.entries:
            raise RuntimeError("QueueEmpty")
        return self.entries.popleft()

    def put_nowait(self, entry: Any) -> None:
        self.entries.append(entry)


class Kernel:
    """A kernel of ipykernel 6: one queue for cells and comm messages, no subshells."""

    def __init__(self, arriving: list[str]) -> None:
        self.msg_queue = Queue()
        self.handled: list[str] = []
        self.parent: tuple[Any, Any] = (b"cell", {"header": {"msg_type": "execute_request"}})
        self._parent_ident = {"shell": b"cell"}
        self.shell_stream = SimpleNamespace(flush=lambda: [self._arrive(kind) for kind in arriving])
        self.session = SimpleNamespace(feed_identities=lambda frames, copy: ([b"id"], frames))

    def _arrive(self, kind: str) -> None:
        frames = [b"signature", json.dumps({"msg_type": kind}).encode()]
        self.msg_queue.put_nowait((len(self.msg_queue.entries), self._dispatch, (frames,)))

    async def _dispatch(self, frames: list[bytes]) -> None:
        kind = json.loads(frames[1])["msg_type"]
        self.parent = (b"comm", {"header": {"msg_type": kind}})
        self.handled.append(kind)

    def get_parent(self, channel: str) -> Any:
        return self.parent[1]

    def set_parent(self, ident: Any, parent: Any) -> None:
        self.parent = (ident, parent)


def test_pump_handles_comms_and_leaves_cells_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(["execute_request", "comm_msg", "comm_open", "inspect_request", "comm_msg"])
    monkeypatch.setattr(comms, "_kernel_with_queue", lambda: kernel)
    assert comms.pump_comm_messages() == 3
    assert kernel.handled == ["comm_msg", "comm_open", "comm_msg"]
    left = [json.loads(entry[-1][0][1])["msg_type"] for entry in kernel.msg_queue.entries]
    assert left == ["execute_request", "inspect_request"]
    assert kernel.parent[1]["header"]["msg_type"] == "execute_request", "later prints belong to the cell again"


def test_pump_does_nothing_without_a_kernel() -> None:
    assert comms.pump_comm_messages() == 0


def test_waiting_pumps_once_however_many_panels() -> None:
    comms.pump_while_waiting()
    comms.pump_while_waiting()
    assert WAIT_HOOKS.count(comms.pump_comm_messages) == 1
