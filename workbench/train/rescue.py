"""After an out-of-memory error: the state after the last good step goes to disk, so that a run with other settings
begins where this one stood.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import RunFolderError
from .explain import is_out_of_memory
from .run_folder import list_checkpoints
from .teardown import collect_memory

if TYPE_CHECKING:
    from .engine import Engine

Fingerprint = tuple[Any, ...]


def fingerprint(optimizer: torch.optim.Optimizer) -> Fingerprint:
    """Return what changes as soon as an update has begun; costs a few microseconds.

    Every optimizer works through its groups from the first parameter on, be it one tensor at a time or all of them in
    one kernel. So the counters of the first parameter of each group, and of its state, tell whether any of them moved.
    """
    marks: list[Any] = []
    for group in optimizer.param_groups:
        first = next((parameter for parameter in group["params"] if parameter.grad is not None), None)
        if first is None:
            continue
        state = optimizer.state.get(first, {})
        marks.append(first._version)
        marks += [(name, value._version if isinstance(value, Tensor) else value) for name, value in state.items()]
    return tuple(marks)


def rescue(engine: Engine, run_dir: Path) -> str:
    """Save the state after the last finished step and return one sentence about where the run can go on.

    Nothing is saved where an update had begun: some weights would be those of a step that never ended. The run then
    goes on from an earlier checkpoint, and the steps after it come again as they were: order and random state are part
    of the checkpoint.

    Args:
        engine: The engine whose step failed; its gradients are dropped.
        run_dir: The run's folder.
    """
    is_clean = engine.update_is_whole
    engine.drop_step()
    collect_memory()
    step = engine.state.global_step
    if step and is_clean:
        try:
            engine.save_checkpoint()
            return f"The state after step {step} is saved: nothing is lost."
        except Exception as error:
            if not (is_out_of_memory(error) or isinstance(error, RunFolderError)):
                raise
    found = list_checkpoints(run_dir)
    if not found:
        return "No step was finished: the run begins again." if not step else (
            f"Step {step} could not be saved and no checkpoint is there: the run begins again."
        )  # fmt: skip
    return f"The run goes on from {found[-1].name}; the steps after it come again as they were."
