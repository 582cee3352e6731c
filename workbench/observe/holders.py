"""Who holds an object: a printable path from a name the user knows down to it.

The search goes forward from names (variables, attributes, closures, frames of exceptions) to objects, breadth first and
bounded, since that yields the path a person would type. The search skips its own frames and everything the library
modules hold among themselves.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .storages import is_user_file

_PLAIN = (str, bytes, int, float, complex, bool, type(None), range, slice, types.BuiltinFunctionType, types.CodeType)
MAX_VISITED = 300_000
MAX_ITEMS = 20_000  # Of one container.


@dataclass(frozen=True, slots=True)
class Holder:
    """One way to reach an object.

    Attributes:
        path: As a person would write it, e.g. ``losses[412]`` or ``trainer.callbacks[2]._cache['logits']``.
        kind: Kind of the root: ``"variable"``, ``"frame"``, ``"exception"``, ``"output history"``, ``"module"``,
            ``"closure"``, ``"model"``, ``"optimizer"``.
        containers: The objects on the way, root first, the target left out.
        labels: What was appended to the path for each of them, the target's label last.
    """

    path: str
    kind: str
    containers: tuple[Any, ...]
    labels: tuple[str, ...] = ()

    def path_to(self, index: int) -> str:
        """Return the path down to ``containers[index]``."""
        return "".join(self.labels[: index + 1])

    @property
    def container(self) -> Any:
        """The object that holds the target directly."""
        return self.containers[-1] if self.containers else None


@dataclass(frozen=True, slots=True)
class Root:
    """A name to start from."""

    name: str
    kind: str
    value: Any


def roots_of_namespace(namespace: Mapping[str, Any], kind: str = "variable") -> list[Root]:
    """Return the names of a namespace as roots; the notebook's own bookkeeping is named as such."""
    found = []
    for name, value in list(namespace.items()):
        if isinstance(value, (types.ModuleType, *_PLAIN)):
            continue
        if name.startswith("__") and name.endswith("__"):
            continue
        is_history = name in ("Out", "_oh", "_", "__", "___", "_dh") or (name[:1] == "_" and name[1:].isdigit())
        found.append(Root(name, "output history" if is_history else kind, value))
    found.sort(key=lambda root: root.kind == "output history")
    return found


def roots_of_frame(frame: types.FrameType | None) -> list[Root]:
    """Return the locals of the frames from ``frame`` outwards, user code only, then the globals."""
    found: list[Root] = []
    namespaces: list[Mapping[str, Any]] = []
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            if frame.f_locals is not frame.f_globals:
                found += roots_of_namespace(frame.f_locals)
            if not any(frame.f_globals is seen for seen in namespaces):
                namespaces.append(frame.f_globals)
        frame = frame.f_back
    for namespace in namespaces:
        found += roots_of_namespace(namespace)
    return found


def roots_of_process() -> list[Root]:
    """Return the globals of ``__main__`` and of every imported module that is the user's own code."""
    found = []
    for name, module in list(sys.modules.items()):
        if name == "__main__":
            found += roots_of_namespace(vars(module))
        elif is_user_file(getattr(module, "__file__", None) or "<frozen") and not name.startswith("workbench"):
            found += [Root(f"{name}.{root.name}", "module", root.value) for root in roots_of_namespace(vars(module))]
    found += [Root(root.name, "exception", root.value) for root in roots_of_exceptions()]
    return found


def roots_of_exceptions() -> list[Root]:
    """Return what ``sys`` keeps of the last exception."""
    names = ("last_exc", "last_value", "last_traceback")
    return [Root(f"sys.{name}", "exception", getattr(sys, name)) for name in names if getattr(sys, name, None)]


def find_holders(
    targets: Iterable[Any], roots: Iterable[Root], *, max_visited: int = MAX_VISITED, skip: Iterable[Any] = ()
) -> dict[int, Holder]:
    """Return the shortest path to each target that a root reaches, by ``id`` of the target.

    Args:
        targets: Objects to find; tensors usually.
        roots: Where to start, in order of preference.
        max_visited: Objects after which the search ends.
        skip: Objects not to go through, e.g. the searcher's own.
    """
    wanted = {id(target) for target in targets}
    found: dict[int, Holder] = {}
    # The path is kept as a linked list (parent, label), so that a visit costs a tuple and no string.
    seen: set[int] = {id(value) for value in skip}
    seen.add(id(wanted))
    queue: deque[tuple[Any, tuple[Any, ...]]] = deque()
    for root in roots:
        if id(root.value) in seen:
            continue
        seen.add(id(root.value))
        queue.append((root.value, (None, root.name, root.kind, root.value)))
    while queue and len(found) < len(wanted) and len(seen) < max_visited:
        value, link = queue.popleft()
        if id(value) in wanted and id(value) not in found:
            found[id(value)] = _holder(link)
        for label, child in _children(value):
            if id(child) in seen or isinstance(child, _PLAIN):
                continue
            seen.add(id(child))
            queue.append((child, (link, label, link[2], child)))
    return found


def _holder(link: tuple[Any, ...]) -> Holder:
    labels, containers, kind = [], [], link[2]
    node: tuple[Any, ...] | None = link
    while node is not None:
        labels.append(node[1])
        containers.append(node[3])
        node = node[0]
    containers.reverse()
    path = "".join(reversed(labels))
    if ".<closure " in path and kind == "variable":
        kind = "closure"
    return Holder(path, kind, tuple(containers[:-1]), tuple(reversed(labels)))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``(label, child)`` of one object; the label is what a person appends to reach the child."""
    kind = type(value)
    if issubclass(kind, (type, types.ModuleType, weakref.ReferenceType)):
        if kind is type and is_user_file(getattr(sys.modules.get(value.__module__), "__file__", None) or "<frozen"):
            yield from ((f".{name}", child) for name, child in list(vars(value).items()) if not name.startswith("__"))
        return
    if issubclass(kind, Tensor):
        if value.is_leaf and value.grad is not None:
            yield ".grad", value.grad
        return
    if issubclass(kind, (dict, types.MappingProxyType)):
        for name, child in list(value.items())[:MAX_ITEMS]:
            yield f"[{name!r}]" if isinstance(name, (str, int)) else "[...]", child
            if isinstance(name, tuple):
                yield "[key]", name
    elif issubclass(kind, (list, tuple, deque, set, frozenset)):
        for index, child in enumerate(list(value)[-MAX_ITEMS:]):
            yield f"[{index}]", child
    elif kind is types.FunctionType:
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=False):
            try:
                yield f".<closure {name}>", cell.cell_contents
            except ValueError:
                continue
        for index, child in enumerate(value.__defaults__ or ()):
            yield f".__defaults__[{index}]", child
        for name, child in (value.__kwdefaults__ or {}).items():
            yield f".__kwdefaults__[{name!r}]", child
    elif kind is types.MethodType:
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif kind is types.FrameType:
        for name, child in value.f_locals.items():
            yield f":{name}", child
    elif kind is types.TracebackType:
        frame = value.tb_frame
        for name, child in frame.f_locals.items():
            yield f" -> frame {frame.f_code.co_name!r} local {name}", child
        if value.tb_next is not None:
            yield "", value.tb_next
    elif kind is types.CellType:
        try:
            yield ".cell_contents", value.cell_contents
        except ValueError:
            return
    elif issubclass(kind, types.GeneratorType) and value.gi_frame is not None:
        for name, child in value.gi_frame.f_locals.items():
            yield f".<generator local {name}>", child
    elif kind.__name__ in ("_lru_cache_wrapper", "_lru_list_elem"):
        # A function under functools.cache: its dictionary, or the links of a bounded one, are not attributes.
        for child in gc.get_referents(value):
            if isinstance(child, dict) and child is not getattr(value, "__dict__", None):
                yield ".<cache>", child
            elif kind.__name__ == "_lru_list_elem":
                yield "", child
    if issubclass(kind, BaseException):
        yield ".__traceback__", value.__traceback__
        yield ".__context__", value.__context__
        yield ".__cause__", value.__cause__
    if kind.__name__ == "partial":
        yield ".args", value.args
        yield ".keywords", value.keywords
        yield ".func", value.func
    yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    names = getattr(value, "__dict__", None) if not isinstance(value, types.FunctionType) else vars(value)
    if not isinstance(names, dict):
        names = {}
    is_module = isinstance(value, nn.Module)
    for name, child in list(names.items())[:MAX_ITEMS]:
        if is_module and name in ("_parameters", "_buffers", "_modules"):
            yield from ((_attribute(inner), item) for inner, item in list(child.items()))
        elif not isinstance(child, _PLAIN):
            yield f".{name}", child
    for slot_class in type(value).__mro__ if not isinstance(value, OrderedDict) else ():
        slots = slot_class.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            child = getattr(value, name, None)
            if child is not None and not isinstance(child, _PLAIN):
                yield f".{name}", child


def _attribute(name: str) -> str:
    return f"[{name}]" if name.isdigit() else f".{name}"


def referrer_text(target: Any, *, skip: Iterable[Any] = (), depth: int = 4) -> str:
    """Describe backwards what refers to an object that no name reaches, e.g. ``cell <- function 'hook' <- dict``."""
    skipped = {id(value) for value in skip} | {id(sys._getframe())}
    words: list[str] = []
    current = target
    for _ in range(depth):
        referrers = [
            value
            for value in gc.get_referrers(current)
            if id(value) not in skipped and value is not words and not isinstance(value, types.FrameType)
        ]
        skipped |= {id(referrers)}
        if not referrers:
            break
        current = referrers[0]
        name = getattr(current, "__qualname__", None)
        words.append(f"{type(current).__name__} {name!r}" if name else type(current).__name__)
    return " <- ".join(words)
