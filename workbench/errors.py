"""Every exception the workbench raises on purpose, drawn as a tree.

::

    WorkbenchError
    ├── RecipeError          the settings are wrong: carries every problem at once
    ├── ModelError           the model cannot be found, read or built
    ├── DataError            the data set cannot be found, read or used
    ├── DeviceError          the device is unknown or cannot do what is asked
    ├── MissingPackageError  an optional package is needed
    ├── EstimateError        the run cannot be traced
    ├── RunError             training failed; ``__cause__`` holds the original
    │   ├── RunFolderError   the run folder is locked, read-only or full
    │   └── NonFiniteError   loss or gradient became NaN or Inf
    └── Cancelled            the user pressed Cancel; nothing was lost

Each message says what was seen, what is allowed and one thing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class WorkbenchError(Exception):
    """Base of all errors the workbench raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a Recipe.

    Attributes:
        field: Dotted path of the field, e.g. ``"quantization.load_in_4bit"``.
        message: What was seen and what is allowed, one sentence.
        fix: A change that works, e.g. ``{"training.mixed_precision": "fp16"}``; empty when only the user can tell.
    """

    field: str
    message: str
    fix: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        hint = " and ".join(f"{path}={value}" for path, value in self.fix)
        return f"{self.field}: {self.message}" + (f" Set {hint}." if hint else "")


class RecipeError(WorkbenchError):
    """The settings are wrong. ``problems`` lists all of them."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class ModelError(WorkbenchError):
    """The model cannot be found, read or built."""


class DataError(WorkbenchError):
    """The data set cannot be found, read or used."""


class DeviceError(WorkbenchError):
    """The device is unknown or cannot do what is asked."""


class MissingPackageError(WorkbenchError):
    """An optional package is needed; the message holds the pip line."""

    def __init__(self, package: str, purpose: str, extra: str | None = None) -> None:
        self.package = package
        line = f"pip install 'workbench[{extra}]'" if extra else f"pip install {package}"
        super().__init__(f"{purpose} needs the package {package}, which is not installed. Run: {line}")


class EstimateError(WorkbenchError):
    """The run cannot be traced."""


class RunError(WorkbenchError):
    """Training failed. The original exception is ``__cause__``."""


class RunFolderError(RunError):
    """The run folder is locked, read-only, full or not a run folder."""


class NonFiniteError(RunError):
    """The loss or a gradient became NaN or Inf and the policy says stop."""


class ExportError(WorkbenchError):
    """A run cannot be exported, or what was written is not what was read back."""


class Cancelled(WorkbenchError):  # noqa: N818  # an answer to the user, not an error
    """The user cancelled the work; nothing was lost."""
