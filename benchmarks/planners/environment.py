"""The planners, their versions, and the environment they run in: made once, below the user's cache."""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from workbench.hardware.store import cache_dir

INSTALL_TIMEOUT_S = 300


@dataclass(frozen=True)
class Planner:
    """One public planner.

    Attributes:
        name: Its name on PyPI.
        version: The version that is run; empty for one that is in our own environment.
        counter: The counter its total predicts, by its own documentation.
        fitted_on: Beginnings of the sources of rows its constants were fitted to.
    """

    name: str
    version: str
    counter: str
    fitted_on: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        """The file that runs it: reads runs as JSON on stdin, writes figures as JSON."""
        return Path(__file__).parent / "scripts" / f"{self.name.replace('-', '_')}.py"


PLANNERS = (
    Planner("fitcheck-llm", "0.3.1", "process", fitted_on=("fitcheck-llm",)),
    Planner("canifinetune", "0.4.1", "reserved"),
    Planner("ftuneai", "0.4.1", "process"),
    Planner("accelerate", "", "allocated"),
)


def planner_python(planner: Planner) -> Path:
    """Return the interpreter to run a planner with; installs it first where it is not there.

    Raises:
        RuntimeError: It cannot be installed; the last line of pip is in the message.
    """
    if not planner.version:
        return Path(sys.executable)
    folder = cache_dir() / "planners" / f"{planner.name}-{planner.version}"
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    done = folder / "installed"
    if done.exists():
        return python
    venv.create(folder, with_pip=True, clear=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        result = subprocess.run(
            [*command, f"{planner.name}=={planner.version}"], capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{planner.name} {planner.version} did not install within {INSTALL_TIMEOUT_S} s") from None
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise RuntimeError(f"{planner.name} {planner.version} does not install here: {lines[-1]}")
    done.touch()
    return python
