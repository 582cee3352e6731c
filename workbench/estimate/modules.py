"""ModuleMap: a model's modules, numbered once, with hooks that tell whoever records which one runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from .tape import NO_LAYER, layer_of


class ModuleWatcher(Protocol):
    """Who is told which module runs."""

    def enter_module(self, index: int) -> None:
        """A module's forward begins."""

    def leave_module(self) -> None:
        """It ends."""


class ModuleMap:
    """Names, layers and parameters of a model's modules. Making one costs milliseconds, so it is kept with its model.

    Attributes:
        names: Paths; index 0 is the model itself, ``""``.
        layers: Layer of each, or NO_LAYER.
        modules: The modules.
        index_of: ``{path: index}``.
        parameter_modules: ``{id(parameter): index}``; a shared parameter belongs to the first that holds it.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_modules())
        lists = frozenset(name for name, module in named if isinstance(module, nn.ModuleList) and _repeats(module))
        self.names = [name for name, _ in named]
        self.layers = [layer_of(name, lists) if name else NO_LAYER for name, _ in named]
        self.modules = [module for _, module in named]
        self.index_of = {name: index for index, name in enumerate(self.names)}
        self.parameter_modules: dict[int, int] = {}
        for index, module in enumerate(self.modules):
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.parameter_modules.setdefault(id(parameter), index)
        self.watcher: ModuleWatcher | None = None
        self._hooks: list[Any] = []

    def watch(self, watcher: ModuleWatcher) -> None:
        """Tell ``watcher`` from here on; the hooks are put on the modules the first time."""
        self.watcher = watcher
        if not self._hooks:
            for index, module in enumerate(self.modules[1:], start=1):
                self._hooks.append(module.register_forward_pre_hook(self._make_enter(index)))
                self._hooks.append(module.register_forward_hook(self._leave))

    def remove_hooks(self) -> None:
        """Take the hooks off the modules."""
        self.watcher = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _make_enter(self, index: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            if self.watcher is not None:
                self.watcher.enter_module(index)

        return enter

    def _leave(self, *_: Any) -> None:
        if self.watcher is not None:
            self.watcher.leave_module()


_MAPS: weakref.WeakKeyDictionary[nn.Module, ModuleMap] = weakref.WeakKeyDictionary()


def kept_map(model: nn.Module) -> ModuleMap:
    """Return the map of a model that is traced again and again; made once."""
    found = _MAPS.get(model)
    if found is None:
        found = _MAPS[model] = ModuleMap(model)
    return found


def _repeats(modules: nn.ModuleList) -> bool:
    """Whether a list holds repeated layers: its members have children of their own."""
    return len(modules) > 0 and any(True for _ in modules[0].children())
