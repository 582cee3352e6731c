"""An emulated GPU: real CPU tensors, counted by the caching allocator of the chosen card, out of memory when it is.

"Be a T4 with 15 GiB": every storage that an operator makes is also a block in the allocator's replay. Running out of
memory, fragmentation and leaks can so be taught, reproduced and tested on a laptop. What a CUDA kernel would do
otherwise than the CPU's (its attention kernel, masks of dropout in bytes) stays as the CPU does it; the estimate models
those.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..components.activations import host_mover
from ..estimate.allocator import AllocatorStats, CachingAllocator, OutOfCapacity, workspace_bytes
from ..estimate.recorder import StorageRecorder
from ..hardware import Device
from ..units import GIB, KIB, MIB

# How far from a running autograd node its parameter is looked for: the product of an adapter is two nodes from it.
NEAR_NODES = 3


@dataclass(frozen=True)
class FailedAllocation:
    """What is known at the instant at which an emulated device is full, before the exception frees anything.

    Attributes:
        num_bytes: Bytes asked for.
        operator: Operator that asked, e.g. ``"aten.mm"``.
        node: Autograd node that ran, e.g. ``"MmBackward0"``; empty outside backward.
        parameter: A trained parameter next to that node in the graph, by identity; None where there is none near.
        sizes: Bytes of every live storage, by the address that ``untyped_storage()._cdata`` gives.
        stats: The allocator's counters.
    """

    num_bytes: int
    operator: str
    node: str
    parameter: int | None
    sizes: Mapping[int, int]
    stats: AllocatorStats


class EmulatedDevice(StorageRecorder):
    """A dispatch mode that counts real CPU storages as blocks of a GPU.

    Args:
        device: The card to be; its capacity less its context is what the allocator may reserve.
        expandable_segments: Allocator setting.
        torch_version: Decides the size of cuBLAS's workspaces, which are taken at once.

    Raises:
        torch.OutOfMemoryError: From the operator whose result has no room, with the text CUDA would give.

    Example:
        >>> with EmulatedDevice(find_device("Tesla T4")) as card:
        ...     big = torch.empty(2**34, dtype=torch.uint8)
        Traceback (most recent call last):
        torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB. ...
    """

    def __init__(self, device: Device, *, expandable_segments: bool = False, torch_version: str | None = None) -> None:
        super().__init__(None, "cpu")
        self.device = device
        self.allocator = CachingAllocator(
            max(0, device.capacity_bytes - device.context_bytes), expandable_segments=expandable_segments
        )
        self.is_on = True
        self.failure: FailedAllocation | None = None
        self._running: Any = None
        # A card without room for the workspaces fails at the first storage: here, where it is only switched on, an
        # error would be the meter's, and the run would go on uncounted.
        self._missing_workspace_bytes = 0
        for num_bytes in workspace_bytes(device.compute_capability, torch_version or torch.__version__):
            try:
                self.allocator.malloc(num_bytes)
            except OutOfCapacity:
                self._missing_workspace_bytes = num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_on:
            self._running = func
            with torch._C.DisableTorchFunction():
                self._adopt(args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def stats(self) -> AllocatorStats:
        """Return the allocator's counters."""
        return self.allocator.stats()

    def _adopt(self, values: Any) -> None:
        """Count tensors that were made where no operator shows: weights read from a file, batches of the loader."""
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.device.type == "cpu":
                    storage = value.untyped_storage()
                    if storage._cdata not in self._live and storage.nbytes():
                        self._bear(storage, 0, storage.nbytes(), 0)
            elif isinstance(value, (list, tuple)):
                self._adopt(value)

    def _note(self, num_bytes: int, operator: int, layer: int) -> int:
        if not self.is_on:
            return -1
        num_bytes = max(num_bytes, self._missing_workspace_bytes)
        try:
            return self.allocator.malloc(num_bytes)
        except OutOfCapacity:
            self.failure = self._describe_failure(num_bytes)
            raise torch.OutOfMemoryError(self._message(num_bytes)) from None

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made where no operator shows, such as the weights of a model read from files.

        Raises:
            torch.OutOfMemoryError: They have no room.
        """
        if self.is_on:
            with torch._C.DisableTorchFunction():
                self._adopt(list(tensors))

    def _describe_failure(self, num_bytes: int) -> FailedAllocation:
        node = torch._C._current_autograd_node()
        live = [(key, birth()) for key, birth in self._live.items()]
        return FailedAllocation(
            num_bytes=num_bytes,
            operator="" if self._running is None else str(self._running._schema.name).replace("::", "."),
            node="" if node is None else node.name(),
            parameter=None if node is None else _nearest_parameter(node),
            sizes={key: storage.nbytes() for key, storage in live if storage is not None},
            stats=self.allocator.stats(),
        )

    def _die(self, token: int) -> None:
        if token >= 0:
            self.allocator.free(token)

    def _message(self, num_bytes: int) -> str:
        stats, device = self.allocator.stats(), self.device
        used = stats.reserved + device.context_bytes
        return (
            f"CUDA out of memory. Tried to allocate {_size(num_bytes)}. GPU 0 has a total capacity of "
            f"{_size(device.capacity_bytes)} of which {_size(max(0, device.capacity_bytes - used))} is free. "
            f"Including non-PyTorch memory, this process has {_size(used)} memory in use. Of the allocated memory "
            f"{_size(stats.allocated)} is allocated by PyTorch, and {_size(stats.reserved - stats.allocated)} is "
            f"reserved by PyTorch but unallocated. (Emulated: {device.name}.)"
        )


def _nearest_parameter(node: Any) -> int | None:
    """Return the identity of a trained parameter that is at most a few nodes away from ``node``."""
    layer = [node]
    for _ in range(NEAR_NODES):
        layer = [following for current in layer for following, _ in current.next_functions if following is not None]
        for found in layer:
            variable = getattr(found, "variable", None)
            if variable is not None:
                return id(variable)
    return None


class EmulatedMeter:
    """Measures a CPU run as if it ran on another card.

    Args:
        device: The card.
        expandable_segments: Allocator setting.
        torch_version: Decides workspace sizes; None takes the installed one.
    """

    def __init__(self, device: Device, *, expandable_segments: bool = False, torch_version: str | None = None) -> None:
        self._device, self._expandable, self._version = device, expandable_segments, torch_version
        self._emulated: EmulatedDevice | None = None
        self._thread = 0
        self._host: AbstractContextManager[None] = nullcontext()
        self.counter = f"allocated bytes of an emulated {device.name}"
        self.baseline_bytes: int | None = None

    def start(self) -> None:
        """Begin counting the storages of this thread."""
        self._emulated = EmulatedDevice(self._device, expandable_segments=self._expandable, torch_version=self._version)
        self.baseline_bytes = self._emulated.stats().allocated
        self._thread = threading.get_ident()
        self._host = host_mover(_move_to_host)
        self._host.__enter__()
        self._emulated.__enter__()  # type: ignore[no-untyped-call]  # torch has no types here

    def measure_step(self) -> dict[str, float]:
        """Return allocated, peak, reserved and process bytes of the emulated card, and reset the peak."""
        if self._emulated is None:
            return {}
        stats = self._emulated.stats()
        self._emulated.allocator.reset_peaks()
        return {
            "allocated_bytes": stats.allocated,
            "peak_allocated_bytes": stats.peak_allocated,
            "reserved_bytes": stats.reserved,
            "process_bytes": stats.reserved + self._device.context_bytes,
        }

    @property
    def failure(self) -> FailedAllocation | None:
        """What is known of the allocation that failed; None while none did."""
        return self._emulated.failure if self._emulated is not None else None

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that no operator made, such as weights read from files; raises where they have no room."""
        if self._emulated is not None:
            self._emulated.adopt(tensors)

    def stop(self) -> None:
        """End counting."""
        emulated, self._emulated = self._emulated, None
        if emulated is None:
            return
        emulated.is_on = False
        if threading.get_ident() == self._thread:
            emulated.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no types here
            self._host.__exit__(None, None, None)
        emulated.close()


def _move_to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Copy a tensor to where the emulated card does not count; it is counted again when an operator reads it."""
    with _disable_current_modes():
        host = tensor.detach().clone()
    return lambda: host


def _size(num_bytes: int) -> str:
    """Return bytes as torch writes them in its out-of-memory message."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.2f} MiB"
    return f"{num_bytes / KIB:.2f} KiB" if num_bytes >= KIB else f"{num_bytes} bytes"
