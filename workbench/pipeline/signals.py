"""Reading the cheap signals of a loop: does a counter rise, what is the loss, which rows were seen, whose code runs."""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from types import FrameType
from typing import Any

import numpy as np
from torch import Tensor

from ..observe.storages import is_user_file, user_line
from .loop_hooks import MicroBatch


def rises(levels: Iterable[float], at_steps: Iterable[float], tokens: Iterable[float]) -> bool:
    """Whether a counter gives reason to look deeply: it rises with the steps beyond what the tokens explain.

    Loose on purpose: a look that finds nothing costs a dozen slower steps, while a missed one costs the run.
    """
    y, steps, slots = (np.asarray(list(values), float) for values in (levels, at_steps, tokens))
    if len(y) < 6:
        return False
    columns = [np.ones_like(steps), steps]
    if slots.std() > 0:
        columns.append(slots)
    design = np.stack(columns, 1)
    solution, *_ = np.linalg.lstsq(design, y, rcond=None)
    residual = y - design @ solution
    spread = float(np.sqrt((residual**2).sum() / max(1, len(y) - len(columns))))
    inverse = np.linalg.pinv(design.T @ design)
    error = spread * float(np.sqrt(max(inverse[1, 1], 0.0)))
    slope = float(solution[1])
    return slope > 100 and (error == 0 or slope > 2 * error)


def fingerprints(micro: MicroBatch) -> list[int]:
    """Return one number per row of token ids on the CPU; a row's bytes hash in about a microsecond."""
    ids = micro.kwargs.get("input_ids", micro.args[0] if micro.args else None)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.device.type != "cpu" or ids.is_floating_point():
        return []
    data = ids.numpy().tobytes()
    width = len(data) // max(1, ids.shape[0])
    return [hash(data[start : start + width]) for start in range(0, len(data), max(1, width))]


def as_float(value: Any) -> float | None:
    """Return a loss as a number; None where there is none."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return float(value.item())
        return float(value.detach().mean()) if value.numel() else None
    return float(value)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's own code."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def called_by_user() -> bool:
    """Whether the code that runs now is a user's own line that names the collector."""
    place = user_line(2)
    if not place:
        return False
    filename, _, line = place.rpartition(":")
    text = linecache.getline(filename, int(line))
    return "collect" in text
