"""What the usual tools say of the same scripts: anomaly mode, ``DebugUnderflowOverflow``, a memory-trend rule.

Each script runs again with the workbench's doctors replaced by the tool, once with its fault and once as its healthy
twin. None of them names a cause, so only two things are noted: whether it raises an alarm, and its first line.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "diagnosis_cases"
TOOLS_OF_KIND = {"nonfinite": ("detect_anomaly", "debug_underflow_overflow"), "leak": ("memory_trend",)}
MIN_READINGS = 10
WARM_UP = 5
MAX_P = 0.01


class Rival:
    """Stands in for ``workbench.watch`` and lets one tool listen to the script.

    Attributes:
        said: First line of the tool's alarm; empty when it was silent.
    """

    def __init__(self, tool: str) -> None:
        self.tool, self.said = tool, ""
        self.findings: list[Any] = []
        self._rest: list[int] = []
        self._debug: Any = None

    def watch(self, target: Any, optimizer: Any = None, **options: Any) -> Rival:
        """Begin to listen to a model or a Trainer."""
        model = getattr(target, "model", target) if hasattr(target, "training_step") else target
        if self.tool == "debug_underflow_overflow":
            from transformers.debug_utils import DebugUnderflowOverflow

            self._debug = DebugUnderflowOverflow(model)
        if hasattr(target, "add_callback"):
            target.add_callback(_steps_of(self))
        return self

    def __enter__(self) -> Rival:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def step(self, **parts: Any) -> None:
        """Take one reading after a step."""
        if self.tool == "memory_trend":
            from workbench.observe.meters import heap_reader

            reader = heap_reader()
            if reader is not None:
                self._rest.append(reader())

    def conclude(self) -> None:
        """Say what the trend of the readings shows."""
        if self.tool == "memory_trend" and not self.said:
            self.said = trend(self._rest)


def _steps_of(rival: Rival) -> Any:
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            rival.step()

    return Steps()


def trend(levels: list[int]) -> str:
    """Return an alarm when a straight line through the readings rises with p below 0.01, the textbook rule."""
    import numpy as np

    if len(levels) < MIN_READINGS:
        return ""
    values = np.asarray(levels[WARM_UP:], float)
    steps = np.arange(len(values), dtype=float)
    slope, intercept = np.polyfit(steps, values, 1)
    spread = float(np.sqrt(((values - intercept - slope * steps) ** 2).sum() / (len(values) - 2)))
    error = spread / float(np.sqrt(((steps - steps.mean()) ** 2).sum()))
    # Student's t at one side of p = 0.01 lies between 2.3 and 2.9 for 8 readings or more.
    if slope <= 0 or (error > 0 and slope / error < 2.9):
        return ""
    return f"memory rises by {slope / 1000:.1f} kB a step (p < {MAX_P})"


@contextlib.contextmanager
def _listening(rival: Rival) -> Iterator[None]:
    import torch

    import workbench

    original = workbench.watch
    workbench.watch = rival.watch
    try:
        with torch.autograd.set_detect_anomaly(rival.tool == "detect_anomaly"):
            yield
    finally:
        workbench.watch = original


def run_under(tool: str, path: str, healthy: bool) -> dict[str, Any]:
    """Run one script under one tool and return what it said."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(FOLDER))
    rival, printed = Rival(tool), io.StringIO()
    namespace: dict[str, Any] = {"HEALTHY": healthy, "__name__": "__main__", "__file__": path}
    error = ""
    try:
        with contextlib.redirect_stdout(printed), _listening(rival):
            exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), namespace)
    except Exception as caught:
        error = f"{type(caught).__name__}: {str(caught).splitlines()[0] if str(caught) else ''}"
    if tool == "detect_anomaly" and "returned nan values" in error:
        rival.said = error
    if tool == "debug_underflow_overflow" and "inf/nan" in printed.getvalue() + error:
        rival.said = _frame_of(printed.getvalue()) or error
    rival.conclude()
    return {"said": rival.said, "findings": [], "error": error, "elapsed_s": 0.0}


def _frame_of(report: str) -> str:
    """Return the last module of the tool's printed frames: the one whose output was bad."""
    frames = [line.strip() for line in report.splitlines() if line[:1] not in ("", " ") or "." in line[:40]]
    named = [line for line in frames if line.split(" ")[-1].count(".") or line.endswith(("Linear", "Norm"))]
    return named[-1] if named else ""


def compare(case: dict[str, Any], isolated: Any) -> list[dict[str, Any]]:
    """Return one row per tool that applies to a case: what it said of the fault and of the healthy twin."""
    rows = []
    for tool in TOOLS_OF_KIND.get(case["cause"].split(".")[0], ()):
        path = str(FOLDER / f"{case['script']}.py")
        fault, twin = isolated(run_under, tool, path, False), isolated(run_under, tool, path, True)
        rows.append(
            {"id": case["id"], "cause": case["cause"], "tool": tool, "alarm": bool(fault.get("said")),
             "said": fault.get("said", ""), "twin_alarm": bool(twin.get("said"))}
        )  # fmt: skip
    return rows
