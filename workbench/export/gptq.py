"""GPTQ and AWQ with gptqmodel, in a process of its own: it changes the environment and threads of the one it is in."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from ..components.cache import cache_dir
from ..errors import ExportError
from ..events import Cancel
from .grade import GradedRows, Measured, save_rows

# optimum is what transformers reads such folders with.
PACKAGES = ("gptqmodel", "optimum", "torchao", "device_smi", "pcre", "tokenicer", "logbar", "defuser", "threadpoolctl")
NAMES = "gptqmodel optimum torchao device-smi pypcre tokenicer logbar defuser threadpoolctl"
POLL_S = 0.2


def require_gptq(to: str) -> None:
    """Check what a calibrated format needs, before anything is merged.

    Raises:
        ExportError: A package is missing, or AWQ has no GPU.
    """
    if to == "awq" and not torch.cuda.is_available():
        raise ExportError(
            "AWQ searches the scales of every layer with kernels for a GPU, and there is no GPU here. "
            "Export gptq, which is fitted to the same data and can be made on a CPU."
        )
    home = own_packages()
    missing = [name for name in PACKAGES if not _is_there(name, home)]
    if missing:
        raise ExportError(
            f"An export to {to} needs {', '.join(missing)}, not installed here. Run: pip install --no-deps "
            f"--no-build-isolation --target {home} {NAMES} (so that neither your torch is replaced nor what is "
            "imported elsewhere changes)."
        )


def own_packages() -> Path:
    """Return the folder that only the process of gptqmodel looks in.

    gptqmodel asks for a newer torch than most machines have, and works with the one that is there. Where it lies beside
    PEFT, every import of PEFT imports it, with its banner, its environment variables and its kernels for other formats.
    """
    return cache_dir() / "gptq"


def _is_there(name: str, home: Path) -> bool:
    return (home / name).is_dir() or (home / f"{name}.py").is_file() or importlib.util.find_spec(name) is not None


def write_calibrated(merged: Path, target: Path, to: str, rows: list[list[int]], cancel: Cancel | None = None) -> None:
    """Quantize a merged model to 4 bits, fitted to rows of tokens.

    Args:
        merged: A folder with a causal model.
        target: An existing folder.
        to: ``"gptq"`` or ``"awq"``.
        rows: Tokens of training rows.
        cancel: Ends the process.

    Raises:
        ExportError: gptqmodel failed; its last words are in the message.
        Cancelled: The user cancelled.
    """
    with tempfile.TemporaryDirectory() as scratch:
        stored = Path(scratch) / "rows.npz"
        np.savez(stored, **{f"row{index:05d}": np.array(row, dtype=np.int64) for index, row in enumerate(rows)})  # type: ignore[arg-type]  # stubs take arrays for the flag
        _work(["quantize", str(merged.resolve()), str(target.resolve()), to, str(stored)], cancel)


def measure_apart(folder: Path, rows: GradedRows, cancel: Cancel | None = None) -> Measured:
    """Let transformers read a calibrated folder, in a process of its own.

    Raises:
        ExportError: It cannot be read; the last words are in the message.
        Cancelled: The user cancelled.
    """
    with tempfile.TemporaryDirectory() as scratch:
        given, found = Path(scratch) / "rows.npz", Path(scratch) / "found.npz"
        save_rows(rows, given)
        _work(["measure", str(folder.resolve()), str(given), str(found)], cancel)
        with np.load(found) as stored:
            return Measured(
                float(stored["perplexity"]),
                float(stored["accuracy_fraction"]),
                int(stored["num_tokens"]),
                float(stored["tokens_per_s"]),
                torch.from_numpy(stored["logits"]),
            )


def _work(arguments: list[str], cancel: Cancel | None) -> None:
    path = [str(own_packages()), *filter(None, sys.path)]
    # Its pool of threads for a CPU is of half the cores, and asks itself for two.
    environment = {"GPTQMODEL_CPU_WORKERS": "2"} | os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", f"{__package__}.gptq_worker", *arguments]
    # It writes logs into the folder that it is started in.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as scratch:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=scratch)
        try:
            while process.poll() is None:
                if cancel is not None:
                    cancel.check()
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            last = lines[-1].strip() if lines else f"exit {process.returncode}"
            raise ExportError(
                f"gptqmodel could not {arguments[0]} this model ({last}). Export gguf-q4_0 or bnb-4bit, "
                "which do without it."
            )
