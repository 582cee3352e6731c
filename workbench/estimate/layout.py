"""Layouts: how a run spreads over devices, and what each would take. Plain data: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .estimate import MemoryEstimate, Verdict

# What FSDP2 and DeepSpeed cut across the ranks of a shard group.
CUTS: dict[str, frozenset[str]] = {
    "ddp": frozenset(),
    "zero1": frozenset({"state"}),
    "zero2": frozenset({"state", "gradient"}),
    "zero3": frozenset({"state", "gradient", "parameter"}),
    "fsdp": frozenset({"state", "gradient", "parameter"}),
    "hybrid": frozenset({"state", "gradient", "parameter"}),
}
LAYOUT_TEXTS = {
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "fsdp": "FSDP2",
    "hybrid": "FSDP2 hybrid",
}
# Layouts that differ by less are taken to be equally fast.
AS_FAST = 0.02
_SIMPLEST_FIRST = ("ddp", "fsdp", "zero1", "zero2", "zero3", "hybrid")


@dataclass(frozen=True)
class Layout:
    """How the devices of a run share the work.

    Attributes:
        kind: What data-parallel ranks cut: a key of ``CUTS``.
        data_parallel: Copies of the (possibly cut) model that see different samples.
        tensor_parallel: Ranks that split each matrix product.
        pipeline_parallel: Stages that the layers are cut into.
        shard_size: Ranks that hold one whole between them; ``data_parallel`` but for ``hybrid``.
    """

    kind: str
    data_parallel: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    shard_size: int = 1

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel

    @property
    def is_split(self) -> bool:
        """Whether one copy of the model computes on several devices."""
        return self.tensor_parallel > 1 or self.pipeline_parallel > 1

    @property
    def cuts(self) -> frozenset[str]:
        """What is cut: of ``state``, ``gradient`` and ``parameter``."""
        return CUTS[self.kind] if self.shard_size > 1 else frozenset()

    @property
    def name(self) -> str:
        """E.g. ``"FSDP2 x8"`` or ``"DDP x2, tensor x4"``."""
        parts = []
        if self.data_parallel > 1 or self.num_devices == 1:
            text = LAYOUT_TEXTS[self.kind] if self.data_parallel > 1 else "one device"
            if self.kind == "hybrid" and self.data_parallel > 1:
                text += f" {self.shard_size}x{self.data_parallel // self.shard_size}"
            elif self.data_parallel > 1:
                text += f" x{self.data_parallel}"
            parts.append(text)
        if self.tensor_parallel > 1:
            parts.append(f"tensor x{self.tensor_parallel}")
        if self.pipeline_parallel > 1:
            parts.append(f"pipeline x{self.pipeline_parallel}")
        return ", ".join(parts)

    @property
    def changes(self) -> dict[str, Any]:
        """Fields of the Recipe that choose this layout, but for the number of machines."""
        return {
            "sharding.num_processes": self.num_devices,
            "sharding.layout": self.kind,
            "sharding.tensor_parallel_size": self.tensor_parallel,
            "sharding.pipeline_parallel_size": self.pipeline_parallel,
        }


@dataclass(frozen=True)
class Traffic:
    """One kind of communication in one optimizer step, as one rank sees it.

    Attributes:
        purpose: E.g. ``"gradients"``, ``"weights"``, ``"activations"``.
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"send"``.
        sent_bytes: What the rank sends.
        calls: Collectives.
        seconds: Time on the wire.
        hidden_s: Of these, what runs under computation.
    """

    purpose: str
    kind: str
    sent_bytes: float
    calls: int
    seconds: float
    hidden_s: float = 0.0


@dataclass(frozen=True)
class LayoutEstimate:
    """What one layout takes.

    Attributes:
        layout: The layout.
        accumulation: Micro-batches of one rank in an optimizer step, so that all layouts see the same samples.
        memory: Of the rank that needs most; None where the layout is refused.
        rank: Which rank that is, e.g. ``"every rank"`` or ``"first stage"``.
        traffic: Communication by purpose and kind.
        compute_s: Seconds of computation in a step, the pipeline's bubble left out.
        bubble_s: Seconds in which a stage waits for the others.
        step_s: Step time with nothing hidden.
        overlapped_s: Step time with communication under computation where the engine does that.
        tokens_per_s: Of all devices together, overlapped.
        efficiency: ``tokens_per_s`` over the number of devices, against one device alone.
        refused: Why the layout cannot be used; empty where it can.
    """

    layout: Layout
    accumulation: int = 1
    memory: MemoryEstimate | None = None
    rank: str = ""
    traffic: Sequence[Traffic] = ()
    compute_s: float = 0.0
    bubble_s: float = 0.0
    step_s: float = 0.0
    overlapped_s: float = 0.0
    tokens_per_s: float = 0.0
    efficiency: float = 0.0
    refused: str = ""

    @property
    def verdict(self) -> Verdict:
        """Whether it fits; what is refused does not."""
        return self.memory.verdict if self.memory is not None else "does_not_fit"

    @property
    def sent_bytes(self) -> Mapping[str, float]:
        """Bytes a rank sends in a step, by kind."""
        sums: dict[str, float] = {}
        for item in self.traffic:
            sums[item.kind] = sums.get(item.kind, 0.0) + item.sent_bytes
        return sums

    @property
    def communication_s(self) -> float:
        """Seconds on the wire in a step."""
        return sum(item.seconds for item in self.traffic)


@dataclass(frozen=True)
class LayoutTable:
    """Layouts of the same work on the same devices, side by side.

    Attributes:
        device_name: The device.
        network_name: The wires.
        num_devices: Devices of each layout.
        samples_per_step: Samples in an optimizer step, the same for all layouts.
        rows: Layouts, fastest that fits first; refused ones last.
        notes: Assumptions a person should know.
    """

    device_name: str
    network_name: str
    num_devices: int
    samples_per_step: int
    rows: Sequence[LayoutEstimate]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def best(self) -> LayoutEstimate | None:
        """The fastest layout that fits, the simplest of equally fast ones; else one that may fit; else None."""
        for wanted in ("fits", "tight"):
            fitting = [row for row in self.rows if row.verdict == wanted and not row.refused]
            if fitting:
                fastest = max(row.tokens_per_s for row in fitting)
                near = [row for row in fitting if row.tokens_per_s >= (1 - AS_FAST) * fastest]
                return min(near, key=lambda row: _SIMPLEST_FIRST.index(row.layout.kind) + 10 * row.layout.is_split)
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values without timelines: what ``--json`` prints."""
        rows = []
        for row in self.rows:
            values = asdict(row)
            if row.memory is not None:
                del values["memory"]["timeline"], values["memory"]["holders"]
            rows.append({"name": row.layout.name, "verdict": row.verdict, "sent_bytes": dict(row.sent_bytes), **values})
        best = self.best
        return {
            "device_name": self.device_name,
            "network_name": self.network_name,
            "num_devices": self.num_devices,
            "samples_per_step": self.samples_per_step,
            "best": best.layout.name if best else None,
            "rows": rows,
            "notes": list(self.notes),
        }
