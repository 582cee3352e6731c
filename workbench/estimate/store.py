"""Traces on disk, so that a new process shows its first number without importing model code or building a model.

A file holds the tape of the traced layers; unrolling it again takes milliseconds. Its name is a digest of everything
that decides a trace: settings, device facts, batch shape, the model's config, this package's own source and the
versions of the libraries that were traced. Plain arrays and JSON, never pickles: a file that was tampered with or cut
short is a file that is not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ..components.cache import cache_dir
from ..components.source import model_names
from ..recipe import Recipe
from .tape import Tape, Work

# About 300 KB a trace: the effects of several models and devices in 60 MB.
MAX_FILES = 200
_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "numpy")
_ARRAYS = ("events", "event_layers", "sizes", "modules", "operators", "layers", "phases")
_LISTS = ("module_names", "module_layers", "operator_names", "phase_names", "marks", "phase_marks", "work_marks")


@dataclasses.dataclass(frozen=True)
class StoredTrace:
    """What is kept of a traced run.

    Attributes:
        tape: The trace of few layers, or of all.
        counts: Parameters, those that train, elements of each of these.
        num_layers: Layers of the whole model.
        period: Layers after which kinds recur, so that the tape is to be unrolled; 0 where it is whole.
    """

    tape: Tape
    counts: tuple[int, int, tuple[int, ...]]
    num_layers: int
    period: int


def trace_path(recipe: Recipe, key: str) -> Path | None:
    """Return where the trace of a run lies, whether it exists or not; None for a run that is not kept.

    Models of the hub and models with code of their own are not kept: without their files nothing tells whether they
    are still the same.

    Args:
        recipe: The settings.
        key: Decides the trace, apart from the model's config and the software.
    """
    folder, config = _folder(), _config_identity(recipe)
    if folder is None or config is None:
        return None
    text = json.dumps([key, config, _software()])
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.npz"


def load_trace(path: Path) -> StoredTrace | None:
    """Return a stored trace; None where there is none that can be read, a broken file is removed."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            stored = _decode(archive)
        os.utime(path)  # the oldest are removed first
        return stored
    except FileNotFoundError:
        return None
    except Exception:  # whatever a broken archive raises: it is made again
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def save_trace(path: Path, stored: StoredTrace) -> None:
    """Keep a trace; a folder that cannot be written keeps none. Readers see the whole file or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, **_encode(stored))
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        _remove_oldest(path.parent)
    except OSError:
        return


def _folder() -> Path | None:
    """Return the folder of traces: ``$WORKBENCH_TRACES``, else one in the cache folder; None where it is set to ""."""
    chosen = os.environ.get("WORKBENCH_TRACES")
    if chosen is None:
        return cache_dir() / "traces"
    return Path(chosen).expanduser() if chosen else None


def _remove_oldest(folder: Path) -> None:
    files = list(folder.glob("*.npz"))
    if len(files) > MAX_FILES:
        for path in sorted(files, key=lambda path: path.stat().st_mtime)[: len(files) - MAX_FILES]:
            path.unlink(missing_ok=True)


def _config_identity(recipe: Recipe) -> str | None:
    """Return what tells two configs behind the same name apart; found without transformers."""
    model = recipe.model
    if model.trust_remote_code:
        return None
    if model.config is not None:
        return "inline"  # the config is part of the key
    name = model.name_or_path.strip()
    if name.lower() in {known.lower() for known in model_names()}:
        return "shipped"  # the configs are part of the package's source
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.suffix == ".json" else None
    except OSError:
        return None


@functools.cache
def _software() -> str:
    """Return a digest of this package's tracing code and data, and of the versions of what it traces."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for folder in ("components", "estimate", "recipe"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".json", ".toml"):
                digest.update(path.name.encode() + path.read_bytes())
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{name} {importlib.metadata.version(name)};".encode())
    return digest.hexdigest()


def _encode(stored: StoredTrace) -> dict[str, Any]:
    tape = stored.tape
    arrays = {name: np.array(getattr(tape, name), dtype=np.int64) for name in _ARRAYS}
    facts = {
        "lists": {name: getattr(tape, name) for name in _LISTS},
        "categories": list(tape.categories.items()),
        "growth": [[token, list(shares.items())] for token, shares in tape.growth.items()],
        "work": tape.work,
        "counts": stored.counts,
        "num_layers": stored.num_layers,
        "period": stored.period,
    }
    return {**arrays, "facts": np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)}


def _decode(archive: Any) -> StoredTrace:
    facts = json.loads(archive["facts"].tobytes())
    values: dict[str, Any] = {name: archive[name].tolist() for name in _ARRAYS}
    for name, items in facts["lists"].items():
        values[name] = [tuple(item) if isinstance(item, list) else item for item in items]
    values["categories"] = dict(facts["categories"])
    values["growth"] = {token: dict(shares) for token, shares in facts["growth"]}
    values["work"] = [Work(item[0], tuple(item[1]), *item[2:]) for item in facts["work"]]
    total, trainable, elements = facts["counts"]
    counts = (total, trainable, tuple(elements))
    return StoredTrace(Tape(**values), counts, facts["num_layers"], facts["period"])
