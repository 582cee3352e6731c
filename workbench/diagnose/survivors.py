"""Verdict of a deep look: leak, bounded buffer, periodic, cycle, longer batch or clean, from exact counts.

With the batch gone and garbage collected, clean training is flat to the byte, so the exact channels need no statistics:
a cohort that has a survivor three steps later, in four of five steps, is a leak; a site whose live bytes rise at every
border is a buffer that is replaced by a longer one; autograd nodes that rise steadily are kept graphs.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..observe.graph_nodes import count_with_graph, heaviest_roots, live_tensors, made_since
from ..observe.holders import Holder, Root, find_holders
from ..observe.memory_look import MIN_AGE, MemoryLook, tensors_of_storages
from ..observe.storages import Birth, is_user_file
from ..units import format_bytes
from .finding import Finding, Fix, make_finding

MIN_COHORTS = 0.8
LATE_SHARE = 0.3
CARRIED_SHARE = 0.9
MIN_BORDERS = 6  # A window that the end of the loop cut shorter says nothing.


@dataclass
class Suspect:
    """One thing that grows.

    Attributes:
        channel: ``"nodes"``, ``"survivors"``, ``"replaced"``, ``"parameters"`` or ``"periodic"``.
        bytes_per_step: Growth of tensor bytes.
        nodes_per_step: Growth of autograd nodes.
        births: Storages that stayed; empty for nodes.
        line: User line that made them.
        period: Steps between cohorts with survivors.
    """

    channel: str
    bytes_per_step: float = 0.0
    nodes_per_step: float = 0.0
    births: list[Birth] = field(default_factory=list)
    line: str = ""
    op: str = ""
    module: str = ""
    period: int = 1
    in_evaluation: bool = False


def find_suspects(look: MemoryLook) -> list[Suspect]:
    """Return what grows in a look, worst first; empty when nothing does."""
    suspects: list[Suspect] = []
    if len(look.num_parameters) == 2 and look.num_parameters[1] > look.num_parameters[0]:
        suspects.append(Suspect("parameters", births=[birth for birth in look.survivors if birth.phase != "optimizer"]))
    nodes = _node_slope(look.nodes)
    survivors = _cohorts(look)
    # What the collector freed had only waited for it, in a loop that turned it off: it grew, and is no buffer.
    cyclic = {birth.line for birth in look.freed_by_gc}
    replaced = _replaced(look, cyclic | {suspect.line for suspect in survivors})
    suspects += survivors + replaced
    if nodes > 0:
        suspects.append(Suspect("nodes", nodes_per_step=nodes))
    return suspects


def follows_tokens(look: MemoryLook) -> bool:
    """Whether the bytes at rest rise only because the batches became longer."""
    tokens, rest = np.asarray(look.tokens, float), np.asarray(look.rest_bytes, float)
    if len(tokens) < 6 or tokens.std() == 0 or rest.std() == 0:
        return False
    return bool(np.corrcoef(tokens, rest)[0, 1] > 0.95)


def _node_slope(samples: Sequence[tuple[int, int]]) -> float:
    """Return nodes gained per step when every sample is above the last, at a steady rate; else 0."""
    if len(samples) < 3:
        return 0.0
    rates = [(b[1] - a[1]) / max(1, b[0] - a[0]) for a, b in itertools.pairwise(samples)]
    return float(rates[-1]) if min(rates) >= 0.5 and rates[-1] >= LATE_SHARE * max(rates) else 0.0


def _cohorts(look: MemoryLook) -> list[Suspect]:
    """Return suspects among storages that stay: steady ones and periodic ones, grouped by the line that made them."""
    cohort_steps = [step for step in look.steps if step <= look.steps[-1] - MIN_AGE]
    by_line: dict[str, list[Birth]] = defaultdict(list)
    for birth in look.survivors:
        by_line[birth.line].append(birth)
    suspects = []
    for line, births in by_line.items():
        steps = sorted({birth.step for birth in births})
        share = len(steps) / max(1, len(cohort_steps))
        gaps = np.diff(steps)
        evaluations = [step for step in sorted(look.evaluation_steps) if step in cohort_steps]
        in_evaluation = sum(birth.phase == "evaluation" for birth in births) > len(births) / 2
        is_periodic = len(steps) >= 2 and gaps.max() <= 1.5 * max(1, gaps.min()) and gaps.min() >= 2
        per_evaluation = (
            len(steps) >= 2 and len(evaluations) < 0.8 * len(cohort_steps) and set(steps) <= set(evaluations)
        )
        if share < MIN_COHORTS and not is_periodic and not per_evaluation:
            continue
        is_steady = share >= MIN_COHORTS
        # Late cohorts must keep as much as early ones, else it is a buffer that settles.
        size = Counter[int]()
        for birth in births:
            size[birth.step] += birth.num_bytes
        span = max(1, cohort_steps[-1] - cohort_steps[0] + 1)
        operators = Counter(birth.op for birth in births).most_common(1)[0][0]
        modules = Counter(birth.module for birth in births).most_common(1)[0][0]
        suspects.append(
            Suspect(
                "survivors" if is_steady else "periodic",
                bytes_per_step=sum(size.values()) / span,
                births=births,
                line=line,
                op=operators,
                module=modules,
                period=1 if is_steady else round(float(gaps.mean())),
                in_evaluation=in_evaluation or per_evaluation,
            )
        )
    return sorted(suspects, key=lambda suspect: -suspect.bytes_per_step)


def _replaced(look: MemoryLook, known: Iterable[str]) -> list[Suspect]:
    """Return sites whose live bytes rise at every border although each storage is replaced."""
    known = set(known)
    tokens = np.asarray(look.tokens, float)
    rows: list[Suspect] = []
    for (line, op, module), series in look.site_bytes.items():
        values = np.asarray(series, float)[2:]
        if line in known or len(values) < 6 or values[0] <= 0:
            continue
        rises = np.diff(values)
        half = len(rises) // 2
        if np.mean(rises > 0) < 0.8 or rises.min() < 0 or rises[half:].mean() < LATE_SHARE * rises[:half].mean():
            continue
        late_tokens = tokens[2:]
        if (
            late_tokens.std() > 0
            and np.corrcoef(late_tokens, values)[0, 1] > 0.98
            and np.all(np.diff(late_tokens) >= 0)
        ):
            continue  # The batches grow as well: it follows the tokens.
        rows.append(Suspect("replaced", bytes_per_step=float(rises.mean()), line=line, op=op, module=module))
    rows.sort(key=lambda suspect: (suspect.op != "aten.cat", -suspect.bytes_per_step))
    total = sum(suspect.bytes_per_step for suspect in rows)
    if rows:
        rows[0].bytes_per_step = total
    return rows[:1]


def name_suspects(
    look: MemoryLook, roots: list[Root], model: nn.Module | None, *, capacity_bytes: int | None = None
) -> list[Finding]:
    """Return one finding for what grows, with its holder; a verdict without fault when nothing leaks."""
    if len(look.steps) < MIN_BORDERS:
        return []
    suspects = find_suspects(look)
    evidence: dict[str, Any] = {"num_steps": len(look.steps), "look_cost_s": round(look.cost_s, 3)}
    named = model.named_parameters() if model is not None else ()
    bad = [name for name, p in named if p.grad is not None and p.grad.requires_grad]
    if bad and suspects:
        return [
            make_finding(
                "leak.create_graph",
                f"{len(bad)} parameters have a .grad that itself requires grad: backward(create_graph=True) left a "
                "cycle of parameter, gradient and graph.",
                where={"parameter": bad[0]},
                evidence=evidence | {"num_parameters": len(bad)},
            )
        ]
    if suspects and suspects[0].channel == "parameters":
        return [_parameters_finding(look, model, evidence)]
    if not suspects:
        return [_clean(look, evidence)]
    nodes = next((suspect for suspect in suspects if suspect.channel == "nodes"), None)
    replaced = next((suspect for suspect in suspects if suspect.channel == "replaced"), None)
    main = next((suspect for suspect in suspects if suspect.channel in ("survivors", "periodic")), None)
    if replaced is not None and (main is None or replaced.op == "aten.cat"):
        return [_replaced_finding(replaced, evidence)]
    if nodes is not None:
        return [_graph_finding(nodes, main, look, roots, evidence)]
    if main is not None:
        return [_kept_finding(main, look, roots, evidence, capacity_bytes)]
    return [_clean(look, evidence)]


def _clean(look: MemoryLook, evidence: dict[str, Any]) -> Finding:
    if look.freed_by_gc_bytes > 0 and len({birth.step for birth in look.freed_by_gc}) >= 3:
        size = format_bytes(look.freed_by_gc_bytes)
        return make_finding(
            "memory.cycle",
            f"{size} waited in reference cycles and one gc.collect() freed it: no leak.",
            evidence=evidence | {"freed_bytes": look.freed_by_gc_bytes},
        )
    if follows_tokens(look):
        return make_finding(
            "memory.longer_batch", "No leak: what is alive between steps follows the tokens of the batch.",
            evidence=evidence | {"largest_batch_tokens": max(look.tokens)},
        )  # fmt: skip
    first, last = look.steps[0], look.steps[-1]
    return make_finding(
        "memory.clean",
        f"No leak: of all storages born in steps {first} to {last - MIN_AGE} none stays step after step, and the "
        "autograd graphs do not grow.",
        evidence=evidence | {"rest_bytes": look.rest_bytes[-1]},
    )


def _parameters_finding(look: MemoryLook, model: nn.Module | None, evidence: dict[str, Any]) -> Finding:
    adapters = list(getattr(model, "peft_config", {}) or {})
    grown = look.num_parameters[1] - look.num_parameters[0]
    text = f" {len(adapters)} adapters are loaded, the newest is {adapters[-1]!r}." if adapters else ""
    return make_finding(
        "leak.parameters_added",
        f"The model itself grows: {grown} more parameters after {len(look.steps)} steps.{text}",
        where={"object": "model"},
        evidence=evidence | {"new_parameters": grown, "num_adapters": len(adapters)},
        confidence=1.0,
    )


def _replaced_finding(suspect: Suspect, evidence: dict[str, Any]) -> Finding:
    size = format_bytes(suspect.bytes_per_step)
    return make_finding(
        "leak.cache_carried",
        f"The same buffer grows instead of being replaced: {size} more each step, made by {suspect.op}"
        + (f" in {suspect.module}" if suspect.module else "")
        + ". A cache is carried from step to step.",
        where={"line": suspect.line, "op": suspect.op, "module": suspect.module},
        evidence=evidence | {"bytes_per_step": suspect.bytes_per_step},
    )


def _graph_finding(
    nodes: Suspect, kept: Suspect | None, look: MemoryLook, roots: list[Root], evidence: dict[str, Any]
) -> Finding:
    known = [tensor for tensor in live_tensors() if tensor.grad_fn is not None]
    tensors = made_since(known, look.first_node) or known
    ranked = heaviest_roots(tensors, 8)
    heavy = [tensor for tensor, _ in ranked]
    containers = find_holders(tensors, roots, skip=[known, tensors, heavy])
    # Many tensors with graphs in one container are a collection; one that reaches nearly all is a running total.
    largest, index = _collection(list(containers.values()))
    rate = nodes.nodes_per_step
    evidence = evidence | {
        "nodes_per_step": rate,
        "nodes": look.nodes[-1][1],
        "bytes_per_step": kept.bytes_per_step if kept else 0.0,
    }
    if len(largest) >= max(3, len(look.steps) // 2):
        owner = largest[0]
        name, container = owner.path_to(index), owner.containers[index]
        if isinstance(container, deque) and container.maxlen is not None:
            return _bounded(name, container.maxlen, evidence)
        if any(isinstance(value, BaseException) for value in owner.containers[index:]):
            return _exceptions_finding(name, len(container), evidence)
        cause = _cause_of_owner(owner, "leak.graph_kept")
        num_kept = max(len(largest), count_with_graph(container))
        return make_finding(
            cause,
            f"'{name}' collects tensors with their autograd graph: {num_kept} so far, {rate:.0f} more graph nodes "
            "every step.",
            where={"object": name, "line": kept.line if kept else ""},
            evidence=evidence | {"num_kept": num_kept},
            confidence=0.95,
        )
    root = _carrier([pair for pair in ranked if id(pair[0]) in containers] or ranked)
    found = containers.get(id(root))
    path = found.path if found else ""
    line = look.mutations.get(int(root.untyped_storage()._cdata), "") or (kept.line if kept else "")
    if root.numel() == 1:
        return make_finding(
            "leak.graph_total",
            f"'{path or 'A scalar'}' is a running total that still carries autograd history: {rate:.0f} more graph "
            "nodes every step stay reachable, no tensor is leaking.",
            where={"object": path, "line": line},
            evidence=evidence,
            fixes=[Fix(f"Add loss.item() or loss.detach() to {path or 'it'}.")],
            confidence=0.95,
        )
    return make_finding(
        "leak.carried_state",
        f"'{path or 'A tensor'}' is carried from step to step with its history: {rate:.0f} more graph "
        f"nodes every step.",
        where={"object": path, "line": line},
        evidence=evidence,
    )


def _collection(holders: list[Holder]) -> tuple[list[Holder], int]:
    """Return a holder for each entry of the fullest container that they share, and where it stands on their way."""
    groups: dict[int, dict[str, Holder]] = defaultdict(dict)
    depth: dict[int, int] = {}
    for holder in holders:
        for index, value in enumerate(holder.containers):
            if isinstance(value, (list, dict, tuple, set, deque)) and len(value) >= 3:
                # By entry: the output of one forward pass holds many tensors, and is one thing all the same.
                groups[id(value)].setdefault(holder.labels[index + 1], holder)
                depth[id(value)] = index
    best = max(groups, key=lambda key: (len(groups[key]), depth[key]), default=None)
    return ([], 0) if best is None else (list(groups[best].values()), depth[best])


def _carrier(ranked: list[tuple[Tensor, int]]) -> Tensor:
    """Return what is carried: of the tensors that reach nearly all kept nodes, the one nearest to them.

    What was computed from a carried state in the last step reaches it as well, so that the heaviest is often not it.
    """
    reach = ranked[0][1]
    return min((pair for pair in ranked if pair[1] >= CARRIED_SHARE * reach), key=lambda pair: pair[1])[0]


def _exceptions_finding(name: str, count: int, evidence: dict[str, Any]) -> Finding:
    return make_finding(
        "leak.kept_tensors",
        f"'{name}' collects exceptions, {count} so far: the traceback of each holds the frames that failed, and they "
        "hold their tensors with the graph.",
        where={"object": name},
        evidence=evidence | {"num_kept": count},
        fixes=[Fix("Keep str(error), or call error.with_traceback(None) before storing it.")],
        confidence=0.95,
    )


def _cause_of_owner(holder: Holder, default: str) -> str:
    """Return a more exact cause when a module or a hook owns the container."""
    owners = holder.containers
    modules = [value for value in owners if isinstance(value, nn.Module)]
    # A module of the user's own class may collect in its own methods; into a library's module only a hook writes.
    inner = modules and not is_user_file(
        getattr(sys.modules.get(type(modules[-1]).__module__), "__file__", None) or "<"
    )
    if inner or any(getattr(value, "__closure__", None) and "hook" in value.__qualname__ for value in owners
                    if hasattr(value, "__qualname__")):  # fmt: skip
        return "leak.hook_buffer"
    return default


def _bounded(name: str, limit: int, evidence: dict[str, Any]) -> Finding:
    return make_finding(
        "memory.bounded_buffer",
        f"'{name}' fills up to its limit of {limit} entries and then stays: no leak.",
        where={"object": name},
        evidence=evidence,
    )


def _kept_finding(
    suspect: Suspect, look: MemoryLook, roots: list[Root], evidence: dict[str, Any], capacity_bytes: int | None
) -> Finding:
    pairs = tensors_of_storages(suspect.births)
    targets: list[Tensor] = [tensor for tensor, _ in pairs]
    holders = find_holders(targets, roots, skip=[pairs, targets])
    counts = Counter(_owner_path(holder) for holder in holders.values())
    path = counts.most_common(1)[0][0] if counts else ""
    holder = next((item for item in holders.values() if _owner_path(item) == path), None)
    alive = sum(birth.num_bytes for birth in suspect.births if birth.is_alive)
    evidence = evidence | {
        "bytes_per_step": suspect.bytes_per_step,
        "num_kept": len(suspect.births),
        "releasing_returns_bytes": alive,
        "period_steps": suspect.period,
    }
    if capacity_bytes and suspect.bytes_per_step > 0:
        evidence["steps_until_full"] = int((capacity_bytes - look.rest_bytes[-1]) / suspect.bytes_per_step)
    if holder is not None:
        bound = next((value for value in holder.containers if isinstance(value, deque) and value.maxlen), None)
        if bound is not None:
            return _bounded(path, int(bound.maxlen or 0), evidence)
    where = {"object": path, "line": suspect.line, "op": suspect.op, "module": suspect.module}
    name = f"'{path}'" if path else "something that no variable reaches"
    size = format_bytes(suspect.bytes_per_step)
    if suspect.channel == "periodic":
        what = "once per evaluation" if suspect.in_evaluation else f"every {suspect.period} steps"
        return make_finding(
            "leak.per_phase",
            f"Growth comes {what}, not at each step: {name} keeps {len(suspect.births)} tensors "
            f"({format_bytes(alive)}).",
            where=where,
            evidence=evidence,
        )
    cause = _cause_of_owner(holder, "leak.kept_tensors") if holder else "leak.steady_growth"
    return make_finding(
        cause,
        f"{name} keeps tensors of every step: {size} more each step, {len(suspect.births)} tensors so far. Releasing "
        f"them returns {format_bytes(alive)}.",
        where=where,
        evidence=evidence,
        confidence=0.95 if holder else 0.7,
    )


def _owner_path(holder: Holder) -> str:
    """Return the path of the growing container: the innermost sequence or dict on the way, else the whole path."""
    index = _growing_index(holder)
    return holder.path if index is None else holder.path_to(index)


def _growing_index(holder: Holder) -> int | None:
    """Return where on the way the innermost container of three or more entries stands; None when there is none."""
    for index in range(len(holder.containers) - 1, -1, -1):
        value = holder.containers[index]
        if isinstance(value, (list, deque, set, dict, tuple)) and len(value) >= 3:
            return index
    return None
