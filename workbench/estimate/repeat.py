"""Layers that repeat are run once where no gradient is recorded; what the others do is copied onto the tape.

Without autograd a layer is a function of its arguments alone: it makes and frees the same storages as the layer one
period before it. Its result and the casts that autocast keeps of its weights are the only tensors that outlive it, so
they are made; everything else is copied as events. Where anything else crosses the border of a layer it is run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .fake import MetaRecorder, describe_result, make_result, signature_of
from .modules import kept_map
from .structure import layer_lists
from .tape import Work
from .target import TargetMode


@dataclass(frozen=True)
class _Layer:
    """A layer of the model.

    Attributes:
        module: The layer.
        number: Its number.
        first: Its index among the modules of the model; its parts follow it.
        parts: Paths of its parts, from itself on.
    """

    module: nn.Module
    number: int
    first: int
    parts: tuple[str, ...]


@dataclass(frozen=True)
class _Record:
    """What one layer did.

    Attributes:
        signature: Of its arguments.
        layer: Which.
        begin_token: First token it bore.
        events: Births and deaths, all of its own tokens.
        work: Its operators.
        casts: ``(path of the parameter, token, shape, strides and dtype)`` of casts that autocast keeps.
        result: Token, and shape, strides and dtype.
        is_tuple: Whether the result is the only member of a tuple.
    """

    signature: Any
    layer: _Layer
    begin_token: int
    events: tuple[int, ...]
    work: tuple[Work, ...]
    casts: tuple[tuple[str, int, Any], ...]
    result: tuple[int, Any]
    is_tuple: bool


class Repeater:
    """Stands in for layers while an evaluation is traced.

    Args:
        recorder: Where to.
        mode: The trace's function mode, for its cache of casts.
        model: The traced model.
        num_layers: Layers of the traced model.
        period: Layers after which kinds recur.
    """

    def __init__(
        self, recorder: MetaRecorder, mode: TargetMode, model: nn.Module, num_layers: int, period: int
    ) -> None:
        self._recorder, self._mode, self._period = recorder, mode, period
        self._layers = _find_layers(model, num_layers)
        self._records: dict[int, _Record | None] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of the layers' ``forward``."""
        modules = [layer.module for layer in self._layers if "forward" not in vars(layer.module)]
        for layer in self._layers:
            if layer.module in modules:
                layer.module.forward = functools.partial(self._run, layer, layer.module.forward)
        try:
            yield
        finally:
            for module in modules:
                del module.forward

    def _run(self, layer: _Layer, forward: Any, *args: Any, **kwargs: Any) -> Any:
        place = layer.number % self._period
        try:
            signature = (signature_of(args), signature_of(tuple(kwargs.items())))
            hash(signature)
        except TypeError:  # An argument that cannot be compared, such as a cache of keys and values.
            return forward(*args, **kwargs)
        record = self._records.get(place)
        if record is not None and record.signature == signature and record.layer.parts == layer.parts:
            return self._repeat(record, layer)
        if place in self._records or layer.number >= self._period:
            return forward(*args, **kwargs)
        return self._record(layer, signature, forward, args, kwargs)

    def _record(self, layer: _Layer, signature: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        tape, casts = self._recorder.tape, self._mode.cast_cache
        begin, token, work, known = len(tape.events), len(tape.sizes), len(tape.work), set(casts)
        result = forward(*args, **kwargs)
        self._records[layer.number % self._period] = None
        is_tuple = isinstance(result, tuple) and len(result) == 1
        value = result[0] if is_tuple else result
        events = tuple(tape.events[begin:])
        labels = {*tape.event_layers[begin:], *tape.layers[token:], *(item.layer for item in tape.work[work:])}
        ends_others = any(event < 0 and ~event < token for event in events)
        if not isinstance(value, Tensor) or labels != {layer.number} or ends_others:
            return result
        made, described = self._recorder.token_of(value), describe_result(value)
        kept = self._kept_casts(layer, known)
        if made is None or described is None or kept is None:
            return result
        ended = {~event for event in events if event < 0}
        alive = [event for event in events if event >= 0 and event not in ended]
        if sorted([made, *(cast for _, cast, _ in kept)]) != alive:
            return result
        self._records[layer.number % self._period] = _Record(
            signature, layer, token, events, tuple(tape.work[work:]), tuple(kept), (made, described), is_tuple
        )
        return result

    def _kept_casts(self, layer: _Layer, known: set[int]) -> list[tuple[str, int, Any]] | None:
        """Return what autocast keeps of a layer's weights since ``known``; None where it cannot be told."""
        paths = {id(parameter): path for path, parameter in layer.module.named_parameters()}
        kept = []
        for key, (_, cast) in self._mode.cast_cache.items():
            if key not in known:
                path, token, described = paths.get(key), self._recorder.token_of(cast), describe_result(cast)
                if path is None or token is None or described is None:
                    return None
                kept.append((path, token, described))
        return kept

    def _repeat(self, record: _Record, layer: _Layer) -> Any:
        recorder = self._recorder
        tape, shift = recorder.tape, len(recorder.tape.sizes) - record.begin_token
        parts = layer.first - record.layer.first
        for event in record.events:
            if event >= 0:
                recorder.copy_token(event, tape.modules[event] + parts, layer.number)
            else:
                recorder.end_bytes(~event + shift)
        tape.work.extend(item._replace(layer=layer.number) for item in record.work)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for path, token, described in record.casts:
                parameter = layer.module.get_parameter(path)
                cast = make_result(described)
                recorder.adopt(cast, token + shift)
                self._mode.cast_cache[id(parameter)] = (parameter, cast)
            token, described = record.result
            result = make_result(described)
            recorder.adopt(result, token + shift)
        return (result,) if record.is_tuple else result


def _find_layers(model: nn.Module, num_layers: int) -> list[_Layer]:
    """Return the layers of the one list that has ``num_layers`` of them; none where several have."""
    lists = [name for name, length in layer_lists(model).items() if length == num_layers]
    if len(lists) != 1:
        return []
    known = kept_map(model)
    found = []
    for number in range(num_layers):
        name = f"{lists[0]}.{number}"
        first = known.index_of[name]
        inside = itertools.takewhile(functools.partial(_is_inside, name), known.names[first + 1 :])
        parts = ("", *(path[len(name) :] for path in inside))
        found.append(_Layer(known.modules[first], number, first, parts))
    return found


def _is_inside(name: str, path: str) -> bool:
    return path.startswith(f"{name}.")
