"""What is left after everything was given back: live tensors, grouped by the name that holds them."""

from __future__ import annotations

import gc
import types
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from ..diagnose.finding import Finding, make_finding
from ..observe.graph_nodes import live_tensors
from ..observe.holders import Holder, Root, find_holders
from ..units import format_bytes

MIN_REPORTED = 1024  # Bytes below which a holder is not worth a line.
MAX_HOLDERS = 12


def name_holders(roots: list[Root]) -> tuple[int, list[Finding]]:
    """Return the bytes of tensors that are alive, and one finding per name that holds many of them.

    Args:
        roots: Names to begin at.
    """
    findings: list[Finding] = []
    tensors = live_tensors()
    sizes: dict[int, int] = {}
    counted: set[int] = set()
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            continue
        key = int(storage._cdata)
        if key not in counted:
            counted.add(key)
            sizes[id(tensor)] = storage.nbytes()
    left_bytes = sum(sizes.values())
    heavy = [tensor for tensor in tensors if sizes.get(id(tensor), 0) >= MIN_REPORTED]
    skip = [tensors, heavy, sizes, roots]
    holders = find_holders(heavy, roots, skip=skip)
    groups: dict[tuple[str, str], int] = defaultdict(int)
    samples: dict[tuple[str, str], Holder] = {}
    unreached = 0
    for tensor in heavy:
        holder = holders.get(id(tensor))
        if holder is None:
            unreached += sizes[id(tensor)]
            continue
        cause, owner = _classify(holder)
        groups[(cause, owner)] += sizes[id(tensor)]
        samples.setdefault((cause, owner), holder)
    for (cause, owner), num_bytes in sorted(groups.items(), key=lambda item: -item[1])[:MAX_HOLDERS]:
        findings.append(
            make_finding(
                cause,
                f"{format_bytes(num_bytes)} held by {owner}, e.g. {samples[(cause, owner)].path}.",
                where={"object": owner, "path": samples[(cause, owner)].path},
                evidence={"held_bytes": num_bytes},
                confidence=0.8,
            )
        )
    if unreached >= MIN_REPORTED:
        findings.append(
            make_finding(
                "release.variable",
                f"{format_bytes(unreached)} held by something that no name reaches (library internals or C++).",
                evidence={"held_bytes": unreached},
                confidence=0.4,
            )
        )
    return left_bytes, findings


def find_idle_adapters() -> Finding | None:
    """Return a finding where a model has adapters that are loaded and not active."""
    for model in [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]:
        configs = model.__dict__.get("peft_config")
        active = getattr(model, "active_adapters", None)
        if not isinstance(configs, dict) or len(configs) < 2 or not isinstance(active, (list, str)):
            continue
        names = [name for name in configs if name not in ([active] if isinstance(active, str) else active)]
        num_bytes = sum(
            parameter.numel() * parameter.element_size()
            for path, parameter in model.named_parameters()
            if any(f".{name}." in path for name in names)
        )
        if num_bytes >= MIN_REPORTED:
            return make_finding(
                "release.idle_adapters",
                f"{len(configs)} adapters are loaded, {len(names)} of them idle ({format_bytes(num_bytes)}): "
                f"{', '.join(names[:4])}.",
                where={"object": type(model).__name__},
                evidence={"num_adapters": len(configs), "idle_bytes": num_bytes},
            )
    return None


def _classify(holder: Holder) -> tuple[str, str]:
    """Return the cause and the owner of one path."""
    containers = holder.containers
    owner = holder.labels[0]
    if holder.kind == "output history":
        return "release.output_history", owner
    if any(isinstance(value, (BaseException, types.TracebackType)) for value in containers):
        return "release.exception", owner
    for index, value in enumerate(containers):
        name = type(value).__name__
        if isinstance(value, torch.optim.Optimizer):
            return "release.optimizer", holder.path_to(index)
        if name == "Accelerator" and len(containers) > index + 1:
            return "release.registry", holder.path_to(min(index + 1, len(containers) - 1))
        if name.endswith("Trainer"):
            return "release.trainer", holder.path_to(index)
        if isinstance(value, nn.Module):
            break
        if isinstance(value, (list, dict, set)) and index > 0 and len(value) > 1 and _holds_models(value):
            return "release.registry", holder.path_to(index)
    if (
        containers
        and isinstance(containers[0], (list, dict))
        and _holds_models(containers[0])
        and len(containers[0]) > 1
    ):
        return "release.registry", owner
    if containers and isinstance(containers[0], (types.FunctionType, types.MethodType)):
        return "release.variable", f"the closure or defaults of {owner}"
    return "release.variable", owner


def _holds_models(value: Any) -> bool:
    items = list(value.values() if isinstance(value, dict) else value)
    return sum(isinstance(item, nn.Module) for item in items) >= 2
