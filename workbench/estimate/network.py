"""Wires between devices: rates, latencies, and the time of one collective over them. Plain numbers, no torch.

Ring and tree are the two algorithms NCCL chooses between; a ring over several machines is as fast as its slowest hop.

Source:
    Bytes per rank and bus bandwidth: PERFORMANCE.md of NVIDIA/nccl-tests. Latencies: ``baseLat`` and ``hwLat`` in
    src/graph/tuning.cc of NVIDIA/nccl 2.18 (the Simple protocol's row, in microseconds).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..hardware import Device
from ..recipe import Recipe

# Seconds NCCL needs to start any collective, and per hop.
BASE_LATENCY_S = 8.4e-6
_HOP_NVLINK_S, _HOP_PCIE_S, _HOP_NETWORK_S = 3.4e-6, 5.7e-6, 14.0e-6
# Share of a link's nominal rate that large collectives reach: 8 A100 read a bus bandwidth of 230 to 240 of their
# 300 GB/s each way; PCIe and Ethernet lose about as much to headers and flow control.
LINK_EFFICIENCY = 0.8
# One way, bytes per second, by the compute capability of the data-centre cards that are sold with NVLink.
# Source: NVIDIA's data sheets of V100 (300 GB/s both ways), A100 (600), H100 and H200 (900), B200 (1800).
_NVLINK_BYTES_PER_S = {(7, 0): 150e9, (8, 0): 300e9, (9, 0): 450e9, (10, 0): 900e9}
# PCIe x16, one way: generation 3 for cards before Ampere, 4 for Ampere and Ada, 5 from Hopper on.
_PCIE_BYTES_PER_S = {7: 16e9, 8: 32e9, 9: 64e9, 10: 64e9, 12: 64e9}
_MACHINE_BYTES_PER_S = {"25gbit": 25e9 / 8, "100gbit": 100e9 / 8, "400gbit": 400e9 / 8}
_NETWORK_NAMES = {"25gbit": "25 Gbit/s", "100gbit": "100 Gbit/s", "400gbit": "400 Gbit/s"}


@dataclass(frozen=True)
class Network:
    """What connects the devices of a run.

    Attributes:
        name: For people, e.g. ``"NVLink, 100 Gbit/s between machines"``.
        devices_per_machine: Devices in each machine.
        device_bytes_per_s: Nominal rate of one device to the others of its machine, one way.
        machine_bytes_per_s: Nominal rate of one machine to the others, one way, shared by its devices.
        device_hop_s, machine_hop_s: Latency of a hop inside a machine and between machines.
        efficiency: Share of the nominal rates that is reached.
    """

    name: str
    devices_per_machine: int
    device_bytes_per_s: float
    machine_bytes_per_s: float
    device_hop_s: float = _HOP_PCIE_S
    machine_hop_s: float = _HOP_NETWORK_S
    efficiency: float = LINK_EFFICIENCY


def network_of(recipe: Recipe, device: Device) -> Network:
    """Return the network of a Recipe's ``sharding`` for this kind of device."""
    sharding = recipe.sharding
    capability = device.compute_capability or (0, 0)
    nvlink = _NVLINK_BYTES_PER_S.get(capability)
    wanted = sharding.network
    if wanted == "auto":
        wanted = "nvlink" if nvlink else "pcie"
    if wanted == "nvlink":
        inside, hop, name = nvlink or 300e9, _HOP_NVLINK_S, "NVLink"
    else:
        inside, hop, name = _PCIE_BYTES_PER_S.get(capability[0], 32e9), _HOP_PCIE_S, "PCIe"
    if sharding.num_machines > 1:
        name += f", {_NETWORK_NAMES[sharding.machine_network]} between machines"
    return Network(
        name=name,
        devices_per_machine=max(1, sharding.num_processes // sharding.num_machines),
        device_bytes_per_s=inside,
        machine_bytes_per_s=_MACHINE_BYTES_PER_S[sharding.machine_network],
        device_hop_s=hop,
    )


@dataclass(frozen=True)
class Group:
    """Ranks that run a collective together.

    Attributes:
        size: Ranks.
        machines: Machines they are spread over.
        sharing: Groups like this one that use each machine's network at the same time.
    """

    size: int
    machines: int = 1
    sharing: int = 1


# What each rank sends, in units of the whole message, over a ring of n ranks.
_RING_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


def sent_bytes(kind: str, message_bytes: float, group: Group) -> float:
    """Return the bytes each rank sends: ``2(n-1)/n`` of the message for an all-reduce, ``(n-1)/n`` for its halves.

    Args:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"send"`` (to one neighbour).
        message_bytes: The whole (gathered) message.
        group: The ranks.
    """
    if kind == "send":
        return message_bytes
    if group.size < 2:
        return 0.0
    return _RING_FACTORS[kind] * message_bytes * (group.size - 1) / group.size


def collective_seconds(kind: str, message_bytes: float, group: Group, network: Network, calls: int = 1) -> float:
    """Return the seconds of ``calls`` collectives that move ``message_bytes`` in all.

    An all-reduce takes the faster of ring and double binary tree: the tree sends as much and waits for ``log2`` of the
    machines where the ring waits for each rank.

    Args:
        kind: As for ``sent_bytes``.
        message_bytes: Of all calls together.
        group: The ranks.
        network: Their wires.
        calls: How many pieces the message is sent in.
    """
    sent = sent_bytes(kind, message_bytes, group)
    if sent == 0 or calls == 0:
        return 0.0
    rate = network.device_bytes_per_s
    if group.machines > 1:
        rate = min(rate, network.machine_bytes_per_s / group.sharing)
    moving = sent / (rate * network.efficiency)
    hops = _ring_latency(kind, group, network)
    if kind == "all_reduce":
        hops = min(hops, _tree_latency(group, network))
    return moving + calls * (BASE_LATENCY_S + hops)


def _ring_latency(kind: str, group: Group, network: Network) -> float:
    if kind == "send":
        return network.machine_hop_s if group.machines > 1 else network.device_hop_s
    rounds = 2 if kind == "all_reduce" else 1
    between = rounds * (group.machines if group.machines > 1 else 0)
    inside = max(0, rounds * (group.size - 1) - between)
    return inside * network.device_hop_s + between * network.machine_hop_s


def _tree_latency(group: Group, network: Network) -> float:
    per_machine = group.size / group.machines
    inside = (per_machine - 1) * network.device_hop_s
    return 2 * (inside + math.log2(max(1, group.machines)) * network.machine_hop_s)
