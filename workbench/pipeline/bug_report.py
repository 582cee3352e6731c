"""What someone who is to help needs to know: versions, devices, what looks wrong; and a zip file without secrets."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import WorkbenchError
from ..units import GIB, format_bytes
from .masking import SECRET, SECRET_NAME, Mask

# Beside what the package requires: what decides how a run or the panel behaves.
SHOWN_PACKAGES = (
    "bitsandbytes", "pytorch-lightning", "lightning", "trl", "deepspeed", "triton", "flash-attn", "tokenizers",
    "huggingface-hub", "pyarrow", "ipykernel", "ipython", "notebook", "jupyter-server", "traitlets",
)  # fmt: skip
# Variables that change what torch, transformers, Jupyter or the workbench do.
SHOWN_VARIABLES = (
    "WORKBENCH_", "HF_", "TRANSFORMERS_", "PYTORCH_", "TORCH_", "CUDA_", "NCCL_", "OMP_", "MKL_", "TOKENIZERS_",
    "BNB_", "JUPYTER_", "COLAB_", "VSCODE_PID", "CONDA_DEFAULT_ENV", "HTTP_PROXY", "HTTPS_PROXY", "PIP_INDEX_URL",
)  # fmt: skip
LOW_DISK_BYTES = 2 * GIB
# Events without a word of the data: of findings only what, where and numbers.
EVENT_KINDS = ("state", "error", "checkpoint", "batch")
PLACES = ("step", "phase", "op", "module", "line", "parameter", "object")
MAX_EVENTS = 400

READ_ME = """What is in here: report.txt and report.json (versions, devices, environment); where a run was given,
its recipe, the events that say how it went, and causes and places of what the doctors found.
What is not: rows of data, weights, metrics. Tokens, passwords, user and machine names and home folders are masked.
Names of models, data files and folders stay: look through the files before you send them.
"""


@dataclass(frozen=True)
class Environment:
    """Where the workbench runs.

    Attributes:
        system: Operating system, Python, machine, front end.
        packages: Versions by name; None where a package is not installed.
        devices: One line for each device.
        folders: Where things are kept, each with the free bytes of its disk.
        variables: Environment variables that matter, secrets masked.
        problems: What looks wrong, each with one thing to do.
    """

    system: Mapping[str, str]
    packages: Mapping[str, str | None]
    devices: tuple[str, ...]
    folders: Mapping[str, str]
    variables: Mapping[str, str]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        """Return it as text, one fact a line."""
        missing = [name for name, version in self.packages.items() if version is None]
        versions = {name: version for name, version in self.packages.items() if version is not None}
        lines = []
        for title, values in (
            ("system", self.system), ("packages", versions), ("folders", self.folders), ("variables", self.variables),
        ):  # fmt: skip
            if not values:
                continue
            width = max(map(len, values))
            lines += [title, *(f"  {name:<{width}}  {value}" for name, value in values.items()), ""]
        lines += [f"not installed: {', '.join(missing) or 'nothing that is known'}", ""]
        lines += ["devices", *(f"  {one}" for one in self.devices), ""]
        lines += ["problems", *(f"  {one}" for one in self.problems or ("none found",))]
        return "\n".join(lines)


def read_environment(mask: Mask | None = None) -> Environment:
    """Look at versions, devices, folders and variables; nothing is sent, and no network is used.

    Args:
        mask: Masks every text; None takes one that knows this machine.
    """
    mask = mask or Mask.of_this_machine()
    packages, problems = _read_packages()
    folders, of_folders = _read_folders()
    devices, of_devices = _read_devices()
    return Environment(
        system={name: mask(value) for name, value in _read_system().items()},
        packages=packages,
        devices=tuple(map(mask, devices)),
        folders={name: mask(value) for name, value in folders.items()},
        variables={name: _shown(name, value, mask) for name, value in sorted(os.environ.items()) if _matters(name)},
        problems=tuple(map(mask, (*problems, *of_devices, *of_folders))),
    )


def write_bug_report(path: str | Path, *, run_dir: str | Path | None = None, mask: Mask | None = None) -> Path:
    """Write a zip file for a bug report: the environment and, where a run is given, how it went; secrets masked.

    Args:
        path: The file; it must not exist yet.
        run_dir: A run's folder.
        mask: Masks every text; None takes one that knows this machine.

    Returns:
        The file.

    Raises:
        WorkbenchError: The file exists or cannot be written, or ``run_dir`` is no run.
    """
    path, mask = Path(path), mask or Mask.of_this_machine()
    environment = read_environment(mask)
    files = {
        "README.txt": READ_ME,
        "report.txt": str(environment) + "\n",
        "report.json": json.dumps(asdict(environment), indent=1, ensure_ascii=False),
    }
    if run_dir is not None:
        files |= dict(_run_files(Path(run_dir)))
    try:
        with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED) as archive:
            for name, text in files.items():
                archive.writestr(name, mask(text))
    except FileExistsError:
        raise WorkbenchError(f"{path} exists already. Give another name, or delete it first.") from None
    except OSError as error:
        raise WorkbenchError(
            f"{path} cannot be written: {error.strerror}. Give a path in a folder of yours."
        ) from error
    return path


def _run_files(folder: Path) -> Iterator[tuple[str, str]]:
    recipe = folder / "recipe.yaml"
    if not recipe.is_file():
        raise WorkbenchError(f"{folder} is no run: it has no recipe.yaml. `workbench runs` lists runs.")
    yield "run/recipe.yaml", recipe.read_text(encoding="utf-8")
    for name in ("events.jsonl", "findings.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            lines = (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
            told = [line for line in map(_without_data, lines) if line]
            yield f"run/{name}", "\n".join(told[-MAX_EVENTS:]) + "\n"


def _without_data(line: str) -> str:
    """Return a line of a run's events that can hold no row's text, or nothing."""
    try:
        event = json.loads(line)
        kind, data = event["kind"], event["data"]
    except (ValueError, KeyError, TypeError):
        return ""
    if kind == "finding":
        where = {name: value for name, value in data.get("where", {}).items() if name in PLACES}
        numbers = {name: value for name, value in data.get("evidence", {}).items() if isinstance(value, int | float)}
        event["data"] = {"cause": data.get("cause"), "where": where, "evidence": numbers}
    elif kind not in EVENT_KINDS:
        return ""
    return json.dumps(event, ensure_ascii=False)


def _read_system() -> dict[str, str]:
    from .. import __version__

    return {
        "workbench": f"{__version__} at {Path(__file__).parents[1]}",
        "python": f"{platform.python_version()} at {sys.executable}",
        "system": platform.platform(),
        "front end": _front_end(),
    }


def _front_end() -> str:
    if "google.colab" in sys.modules:
        return "Google Colab"
    if "VSCODE_PID" in os.environ or "VSCODE_CWD" in os.environ:
        return "Visual Studio Code"
    return "a Jupyter kernel" if "ipykernel.kernelapp" in sys.modules else "no notebook"


def _read_packages() -> tuple[dict[str, str | None], list[str]]:
    """Return versions, and what is older or newer than what the workbench was made for."""
    from packaging.requirements import Requirement

    # Without metadata (run from a folder that was never installed) only what is shown anyway is known.
    lines: list[str] = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        lines = importlib.metadata.requires("workbench") or []
    required = [Requirement(line) for line in lines if "extra ==" not in line]
    names = list(dict.fromkeys([*(one.name for one in required), *SHOWN_PACKAGES]))
    versions = {name: _version(name) for name in names}
    problems = []
    for one in required:
        version = versions[one.name]
        if version is None:
            problems.append(f'{one.name} is not installed. Run: pip install "{one}"')
        elif not one.specifier.contains(version, prereleases=True):
            problems.append(f'{one.name} {version} is installed, {one.specifier} is needed. Run: pip install "{one}"')
    return versions, problems


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_devices() -> tuple[list[str], list[str]]:
    import torch

    from ..hardware import read_device

    lines, problems = (
        [f"torch {torch.__version__}, {torch.get_num_threads()} threads", read_device("cpu").describe()],
        [],
    )
    if torch.cuda.is_available():
        driver = torch.version.cuda or torch.version.hip
        lines += [f"{torch.cuda.get_device_name(index)} (CUDA or ROCm {driver})"
                  for index in range(torch.cuda.device_count())]  # fmt: skip
        lines.append(read_device("cuda").describe())
    elif shutil.which("nvidia-smi"):
        problems.append(
            f"There is an NVIDIA driver, but torch {torch.__version__} sees no GPU. "
            "Install the torch build for your driver: https://pytorch.org/get-started/locally"
        )
    if torch.backends.mps.is_available():
        lines.append("MPS (Apple): the workbench estimates for it, and trains on the CPU")
    return lines, problems


def _read_folders() -> tuple[dict[str, str], list[str]]:
    from ..components.cache import cache_dir
    from ..train.run_folder import DEFAULT_ROOT

    folders, problems = {}, []
    for name, folder in (("cache", cache_dir()), ("runs", Path(DEFAULT_ROOT).absolute())):
        there = next(one for one in (folder, *folder.parents) if one.is_dir())
        free = shutil.disk_usage(there).free
        folders[name] = f"{folder} ({format_bytes(free)} free)"
        if not os.access(there, os.W_OK):
            problems.append(f"The {name} folder {folder} cannot be written. Choose another (WORKBENCH_CACHE, --out).")
        elif free < LOW_DISK_BYTES:
            problems.append(f"The disk of the {name} folder {folder} has {format_bytes(free)} left. Make room on it.")
    return folders, problems


def _matters(name: str) -> bool:
    return name.upper().startswith(SHOWN_VARIABLES)


def _shown(name: str, value: str, mask: Mask) -> str:
    return SECRET if SECRET_NAME.search(name) and value else mask(value)
