"""Ranks: the processes of one run, one on each device, and what they agree on.

``torchrun``, ``accelerate launch``, DeepSpeed and Ray all say in the environment which of how many a process is. What
is here works under each of them; nothing below knows which one it was.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..errors import Problem, RecipeError, RunError
from ..hardware import Device
from ..recipe import Recipe

RANK_FOLDERS = "ranks"
STOP_FILE = "stop"

# A process group gives up by itself only long after the watch below has named who is late.
_GROUP_TIMEOUT_FACTOR = 4
_JOIN_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which process this is.

    Attributes:
        rank: 0 for the main one, which writes checkpoints and the result.
        size: Processes in all; 1 without a launcher.
        local_rank: Number among the processes of this machine, and of its device.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def folder(self, run_dir: Path) -> Path:
        """Return where this rank records its steps: the run folder itself for rank 0."""
        return run_dir if self.is_main else run_dir / RANK_FOLDERS / f"rank-{self.rank:04d}"


def read_ranks() -> Ranks:
    """Return what a launcher wrote into the environment; one process where there was none.

    Raises:
        RunError: The launcher's variables contradict each other.
    """
    try:
        ranks = Ranks(*(int(os.environ.get(name, default)) for name, default in _VARIABLES))
    except ValueError:
        seen = {name: os.environ.get(name) for name, _ in _VARIABLES}
        raise RunError(f"The launcher's variables are not numbers: {seen}. Start with workbench launch.") from None
    if not 0 <= ranks.rank < ranks.size:
        raise RunError(f"RANK is {ranks.rank} and WORLD_SIZE {ranks.size}. Start with workbench launch or torchrun.")
    return ranks


_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def for_ranks(recipe: Recipe, size: int) -> Recipe:
    """Return the Recipe for another number of processes with the same samples in an optimizer step.

    Raises:
        RecipeError: The accumulation cannot make up for the difference.
    """
    training, before = recipe.training, recipe.sharding.num_processes
    if size == before:
        return recipe
    micro_batches = training.gradient_accumulation_steps * before
    if micro_batches % size:
        message = f"a step has {micro_batches} micro-batches, which {size} processes cannot share equally."
        fitting = max(count for count in range(1, size + 1) if micro_batches % count == 0)
        raise RecipeError([Problem("sharding.num_processes", message, (("sharding.num_processes", fitting),))])
    changes = {"sharding.num_processes": size, "training.gradient_accumulation_steps": micro_batches // size}
    if size % recipe.sharding.num_machines:
        changes["sharding.num_machines"] = 1
    return recipe.with_changes(changes)


def join_ranks(ranks: Ranks, device: Device, timeout_s: float) -> None:
    """Connect this process with the others; NCCL between GPUs, gloo between CPUs.

    Args:
        ranks: This process.
        device: Decides the backend.
        timeout_s: After so long without progress a late rank is named.

    Raises:
        RunError: Not every rank arrived.
    """
    import torch
    from torch import distributed

    if distributed.is_initialized():
        return
    on_gpu = device.has_caching_allocator
    if on_gpu:
        torch.cuda.set_device(ranks.local_rank)
    try:
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo", timeout=timedelta(seconds=max(_JOIN_TIMEOUT_S, timeout_s))
        )
    except Exception as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RunError(
            f"Rank {ranks.rank} of {ranks.size} did not find the others at {address} ({error}). "
            "Look whether every machine was started, and reaches that address."
        ) from error
    group_timeout = timedelta(seconds=_GROUP_TIMEOUT_FACTOR * max(timeout_s, _JOIN_TIMEOUT_S))
    distributed.distributed_c10d._set_pg_timeout(group_timeout, distributed.group.WORLD)


def leave_ranks() -> None:
    """Disconnect, where this process was connected."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def add_up(values: Sequence[float], device: Any) -> list[float]:
    """Return the sums of some numbers over all ranks; every rank must call it.

    Args:
        values: This rank's.
        device: Where collectives run: ``"cpu"`` under gloo, the GPU under NCCL.
    """
    import torch
    from torch import distributed

    sums = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(sums)
    return [float(value) for value in sums.tolist()]


class RankWatch:
    """Notices that nothing moves any more, and names the rank the others wait for.

    Every rank runs the same sequence of marks (fetch, agree, each micro-batch, save ...) and puts the number of its
    last one into the store that the process group was made with. A rank that stands still for too long compares: who
    has the lowest number did not arrive.

    Args:
        ranks: This process.
        timeout_s: Seconds without a mark.
        on_late: Called once, in the watch's thread, with one sentence about who is late and where.
    """

    def __init__(self, ranks: Ranks, timeout_s: float, on_late: Callable[[str], None]) -> None:
        from torch import distributed

        store: Any = distributed.distributed_c10d._get_default_store()
        self._ranks, self._timeout_s, self._on_late = ranks, timeout_s, on_late
        self._store: Any = distributed.distributed_c10d.PrefixStore("workbench", store)
        self._count = 0
        self._last = time.monotonic()
        self._ended = threading.Event()
        self._watched = threading.get_ident()
        self.mark("joined")
        self._thread = threading.Thread(target=self._run, name="workbench-ranks", daemon=True)
        self._thread.start()

    def mark(self, place: str) -> None:
        """Say where this rank is; called by the training thread."""
        self._count += 1
        self._store.set(str(self._ranks.rank), f"{self._count} {place}")
        self._last = time.monotonic()

    def close(self) -> None:
        """End watching."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self._timeout_s / 5)):
            if time.monotonic() - self._last > self._timeout_s:
                self._on_late(self._sentence())
                return

    def _sentence(self) -> str:
        places = self._places()
        lowest = min(count for count, _ in places.values())
        late = [rank for rank, (count, _) in places.items() if count == lowest]
        waiting = len(places) - len(late)
        if not waiting:
            where = f"All {len(places)} ranks stand at {places[late[0]][1]}"
            return f"{where} for {self._timeout_s:g} s. {self._own_line()}Raise sharding.timeout_s if steps are slow."
        names = ", ".join(f"rank {rank}" for rank in late[:8]) + (" ..." if len(late) > 8 else "")
        text = (
            f"{names} did not arrive: still at {places[late[0]][1]}, while {waiting} of {len(places)} ranks wait "
            f"at {max(places.values())[1]} for {self._timeout_s:g} s. "
        )
        if self._ranks.rank in late:
            text += self._own_line()
        return text + "Look at the log of that rank; the run goes on from its last checkpoint."

    def _places(self) -> dict[int, tuple[int, str]]:
        places = {}
        for rank in range(self._ranks.size):
            if self._store.check([str(rank)]):
                count, _, place = self._store.get(str(rank)).decode().partition(" ")
                places[rank] = (int(count), place)
            else:
                places[rank] = (0, "the start")
        return places

    def _own_line(self) -> str:
        """Return where the training thread of this process stands."""
        frame = sys._current_frames().get(self._watched)
        if frame is None:
            return ""
        stack = traceback.extract_stack(frame)
        line = next((item for item in reversed(stack) if "site-packages" not in item.filename), stack[-1])
        return f"This rank is in {Path(line.filename).name}, line {line.lineno} ({line.line}). "
