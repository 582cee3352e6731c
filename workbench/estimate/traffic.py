"""What the ranks of a layout send to each other in one optimizer step, how long it takes, and what of it is hidden."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..units import MIB
from .layout import Layout, Traffic
from .network import Group, Network, collective_seconds, sent_bytes
from .sharded_tape import DEEPSPEED_BUCKET_ELEMENTS

# Of a micro-batch, backward takes two thirds: twice the products of forward.
BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class Load:
    """What one rank computes and holds, before anything is cut by data parallelism.

    Attributes:
        weight_bytes: All weights of the rank (its share under tensor and pipeline parallelism).
        root_bytes: Of these, what belongs to no layer.
        gradient_bytes: Gradients.
        activation_bytes: One micro-batch's hidden states between two layers.
        logit_bytes: One micro-batch's logits; 0 where they are not gathered.
        num_layers: Layers of the rank.
        recomputes: Whether backward computes the forward pass again.
        micro_s: Seconds of one micro-batch.
        optimizer_s: Seconds of the optimizer step.
        accumulation: Micro-batches in an optimizer step.
        bucket_bytes: DDP's buckets.
    """

    weight_bytes: float
    root_bytes: float
    gradient_bytes: float
    activation_bytes: float
    logit_bytes: float
    num_layers: int
    recomputes: bool
    micro_s: float
    optimizer_s: float
    accumulation: int
    bucket_bytes: float = 25 * MIB


@dataclass(frozen=True)
class Groups:
    """Groups of ranks: neighbours split products, copies come next, stages are furthest apart."""

    data: Group
    shard: Group
    replicate: Group
    tensor: Group
    stage: Group


def groups_of(layout: Layout, devices_per_machine: int) -> Groups:
    """Return the groups of a layout whose devices fill machines one after the other."""
    per_machine = max(1, devices_per_machine)

    def group(size: int, stride: int) -> Group:
        """Ranks ``stride`` apart."""
        machines = max(1, min(size, math.ceil(size * stride / per_machine)))
        # Ranks between two of a group belong to groups of their own, which send over the same wire.
        return Group(size, machines, min(stride, per_machine) if machines > 1 else 1)

    tensor = layout.tensor_parallel
    stage_stride = tensor * layout.data_parallel
    return Groups(
        data=group(layout.data_parallel, tensor),
        shard=group(layout.shard_size, tensor),
        replicate=group(layout.data_parallel // layout.shard_size, tensor * layout.shard_size),
        tensor=group(tensor, 1),
        stage=group(2, stage_stride) if layout.pipeline_parallel > 1 else Group(1),
    )


def traffic_of(layout: Layout, load: Load, network: Network) -> list[Traffic]:
    """Return the communication of one optimizer step, as the rank with most to send sees it.

    * DDP reduces gradients once a step, in buckets, under the backward pass of the last micro-batch.
    * ZeRO-1 does it once a step, ZeRO-2 in every micro-batch; both gather the updated weights after the step, where
      nothing is left to compute.
    * ZeRO-3 and FSDP2 gather the weights in forward and again in backward, and reduce gradients, in every micro-batch.
    * Tensor parallelism adds up activations twice a layer in forward and twice in backward; the layer waits for it.
    * Stages send activations forward and their gradients back.

    Source:
        Rajbhandari et al. 2020, arXiv:1910.02054, section 7 (ZeRO-1 and 2 send as much as DDP, ZeRO-3 half as much
        again); Shoeybi et al. 2019, arXiv:1909.08053, section 3; Narayanan et al. 2021, arXiv:2104.04473, section 3.
    """
    made = _Traffic(network)
    groups = groups_of(layout, network.devices_per_machine)
    if layout.data_parallel > 1:
        _add_data_parallel(made, layout, load, groups)
    if layout.tensor_parallel > 1:
        passes = 6 if load.recomputes else 4
        calls = passes * load.num_layers * load.accumulation
        made.add("activations", "all_reduce", calls * load.activation_bytes, calls, groups.tensor)
        made.add(
            "logits", "all_gather", load.accumulation * load.logit_bytes, load.accumulation, groups.tensor
        )  # fmt: skip
    if layout.pipeline_parallel > 1:
        calls = 2 * load.accumulation
        made.add("stage borders", "send", calls * load.activation_bytes, calls, groups.stage)
    return made.rows


class _Traffic:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.rows: list[Traffic] = []

    def add(
        self, purpose: str, kind: str, message_bytes: float, calls: int, group: Group, room_s: float = 0.0
    ) -> float:
        """Add one row; ``room_s`` is computation that may hide all of it but one call. Returns what is hidden."""
        if group.size < 2 or not message_bytes:
            return 0.0
        seconds = collective_seconds(kind, message_bytes, group, self.network, calls)
        hidden = min(room_s, seconds * (1 - 1 / calls))
        self.rows.append(Traffic(purpose, kind, sent_bytes(kind, message_bytes, group), calls, seconds, hidden))
        return hidden


def _add_data_parallel(made: _Traffic, layout: Layout, load: Load, groups: Groups) -> None:
    accumulation, gradients = load.accumulation, load.gradient_bytes
    backward_s = BACKWARD_SHARE * load.micro_s
    deepspeed_calls = max(1, math.ceil(gradients / (4 * DEEPSPEED_BUCKET_ELEMENTS)))
    if layout.kind == "ddp" or layout.shard_size < 2:
        calls = max(1, math.ceil(gradients / load.bucket_bytes))
        made.add("gradients", "all_reduce", gradients, calls, groups.data, backward_s)
    elif layout.kind in ("zero1", "zero2"):
        times = accumulation if layout.kind == "zero2" else 1
        made.add(
            "gradients", "reduce_scatter", times * gradients, times * deepspeed_calls, groups.shard, times * backward_s
        )
        made.add("weights", "all_gather", gradients, deepspeed_calls, groups.shard)
    else:
        passes = (2 * (load.weight_bytes - load.root_bytes) + load.root_bytes) * accumulation
        room_s = load.micro_s * accumulation
        calls = (2 * load.num_layers + 1) * accumulation
        hidden = made.add("weights", "all_gather", passes, calls, groups.shard, room_s)
        room_s = min(room_s - hidden, backward_s * accumulation)
        calls = load.num_layers * accumulation
        hidden = made.add("gradients", "reduce_scatter", gradients * accumulation, calls, groups.shard, room_s)
        share = gradients * accumulation / layout.shard_size
        made.add("gradients", "all_reduce", share, calls, groups.replicate, max(0.0, room_s - hidden))
