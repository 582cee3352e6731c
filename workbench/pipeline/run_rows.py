"""The runs below a folder with what was predicted and what was measured; and runs side by side."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RunFolderError
from ..events import Cancel
from ..observe.history import Floats, History
from ..recipe import Recipe
from ..train.run_folder import METRICS, RunSummary, list_runs, read_recipe_of, summarise_run

PREDICTION = "prediction.json"
# More curves than a person tells apart.
MAX_COMPARED = 6


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was predicted for a run when it began.

    Attributes:
        peak_bytes: Highest allocated bytes, with what the process held before the run: what its meter counts.
        step_s: Seconds of an optimizer step.
        device: The device it was predicted for.
    """

    peak_bytes: float
    step_s: float
    device: str


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run of the table.

    Attributes:
        summary: What its folder says.
        predicted: What was predicted, or None where nobody asked before the run.
        measured_peak_bytes: Highest allocated bytes of a step, or None.
        measured_step_s: Median seconds of a step, or None.
    """

    summary: RunSummary
    predicted: Prediction | None
    measured_peak_bytes: float | None
    measured_step_s: float | None


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side.

    Attributes:
        rows: The runs.
        settings: ``{field: one value a run}`` of the settings that differ.
        losses: One ``(steps, values)`` a run.
        eval_losses: The same of the held-out rows; empty arrays where a run has none.
    """

    rows: tuple[RunRow, ...]
    settings: dict[str, tuple[Any, ...]]
    losses: tuple[tuple[Floats, Floats], ...]
    eval_losses: tuple[tuple[Floats, Floats], ...]


def write_prediction(run_dir: str | Path, prediction: Prediction) -> None:
    """Keep what was predicted in the run's folder, so that every later look can compare.

    A folder that cannot be written keeps no prediction: no reason to disturb the run.
    """
    values = {"peak_bytes": prediction.peak_bytes, "step_s": prediction.step_s, "device": prediction.device}
    with contextlib.suppress(OSError):
        final = Path(run_dir) / PREDICTION
        temporary = final.with_name(f".writing-{PREDICTION}")
        temporary.write_text(json.dumps(values), encoding="utf-8")
        temporary.replace(final)


def read_prediction(run_dir: str | Path) -> Prediction | None:
    """Return what was predicted for a run, or None where nothing was kept or it is damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        values = json.loads((Path(run_dir) / PREDICTION).read_text(encoding="utf-8"))
        return Prediction(float(values["peak_bytes"]), float(values["step_s"]), str(values["device"]))
    return None


def list_run_rows(root: str | Path, cancel: Cancel | None = None) -> list[RunRow]:
    """Return the runs directly below ``root``, newest first.

    Raises:
        Cancelled: The user cancelled.
    """
    found = []
    for summary in list_runs(root):
        if cancel is not None:
            cancel.check()
        found.append(read_row_of(summary))
    return found


def read_row_of(summary: RunSummary) -> RunRow:
    """Return a run's row: its summary with what was predicted and measured."""
    peak, step_s = _measured(summary.path)
    return RunRow(summary, read_prediction(summary.path), peak, step_s)


def compare_runs(run_dirs: Sequence[str | Path]) -> RunComparison:
    """Put runs side by side.

    Args:
        run_dirs: Two to six run folders.

    Raises:
        RunFolderError: Fewer than two or more than six, or one is no run folder.
        RecipeError: The Recipe of one is damaged.
    """
    if not 2 <= len(run_dirs) <= MAX_COMPARED:
        raise RunFolderError(f"{len(run_dirs)} runs are given; a comparison takes 2 to {MAX_COMPARED}.")
    recipes = [read_recipe_of(folder) for folder in run_dirs]
    histories = [History.from_folder(folder) for folder in run_dirs]
    return RunComparison(
        rows=tuple(read_row_of(summarise_run(folder)) for folder in run_dirs),
        settings=differing_settings(recipes),
        losses=tuple(history.decimated("loss") for history in histories),
        eval_losses=tuple(history.decimated("eval_loss") for history in histories),
    )


def differing_settings(recipes: Sequence[Recipe]) -> dict[str, tuple[Any, ...]]:
    """Return ``{field: one value a Recipe}`` of the fields in which they are not all the same."""
    first = recipes[0]
    fields = dict.fromkeys(path for other in recipes[1:] for path in first.diff(other))
    return {path: tuple(recipe.get(path) for recipe in recipes) for path in fields}


def continue_changes(run_dir: str | Path) -> dict[str, Any]:
    """Return the changes that make a new run start from the adapter of an earlier one.

    Raises:
        RunFolderError: It is no run folder, or has saved no adapter.
        RecipeError: Its Recipe is damaged.
    """
    folder = Path(run_dir)
    recipe = read_recipe_of(folder)
    if not (folder / "adapter").is_dir():
        raise RunFolderError(
            f"{folder.name} has saved no adapter: it trained every weight, or it has not ended. "
            "Choose a run with an adapter, or resume this one."
        )
    kept = ("model.name_or_path", "model.config", "model.revision", "model.task", "adapter.method")
    return {**{path: recipe.get(path) for path in kept}, "adapter.name_or_path": str(folder / "adapter")}


# A run that has ended does not change; a table of fifty would otherwise read fifty histories at every look.
_MEASURED: dict[Path, tuple[tuple[int, int], tuple[float | None, float | None]]] = {}


def _measured(folder: Path) -> tuple[float | None, float | None]:
    """Return the highest allocated bytes and the median seconds of a step; None where nothing was measured."""
    try:
        status = (folder / METRICS).stat()
    except OSError:
        return None, None
    stamp = (status.st_mtime_ns, status.st_size)
    known = _MEASURED.get(folder)
    if known is None or known[0] != stamp:
        history = History.from_folder(folder)
        peaks = [float(value) for value in history.column("peak_allocated_bytes") if math.isfinite(value)]
        # The first step makes the optimizer's state and is no measure of the others.
        steps = [float(value) for value in history.column("step_s") if math.isfinite(value)]
        steps = steps[1:] or steps
        known = (stamp, (max(peaks, default=None), statistics.median(steps) if steps else None))
        _MEASURED[folder] = known
    return known[1]
