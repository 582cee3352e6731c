"""Measured profiles of devices, kept as small JSON files in the user's cache: one per device and torch version."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .curves import Points

PROFILE_VERSION = 2


@dataclass(frozen=True)
class Profile:
    """What was measured of a device.

    Attributes:
        device_name: As ``Device.name``.
        torch_version: The rates belong to this version's kernels.
        num_threads: CPU threads torch used; 0 on a GPU.
        bandwidth_bytes_per_s: Bytes read plus bytes written per second by a large element-wise operator.
        flops_per_s: Best matrix product by dtype name.
        launch_s: Host time of one small operator, autograd included.
        efficiency: Fractions of the rates above by operator class, see ``calibrate.py``.
        rates: Rates by kind of work over shapes or sizes, see ``probes.py``; empty on a GPU.
        overhead_s: Time of reaching one operator, by phase; empty on a GPU.
        is_quick: True for the one-second measurement that stands in until someone calibrates.
    """

    device_name: str
    torch_version: str
    num_threads: int
    bandwidth_bytes_per_s: float
    flops_per_s: dict[str, float]
    launch_s: float
    efficiency: dict[str, float] = field(default_factory=dict)
    rates: Mapping[str, Points] = field(default_factory=dict)
    overhead_s: Mapping[str, float] = field(default_factory=dict)
    is_quick: bool = False


def cache_dir() -> Path:
    """Return the user's cache folder: ``$WORKBENCH_CACHE``, else ``~/.cache/workbench``. Not created here."""
    chosen = os.environ.get("WORKBENCH_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "workbench"


def profile_path(device_name: str, torch_version: str, num_threads: int) -> Path:
    """Return where the profile of a device, torch version and number of threads is kept."""
    key = re.sub(r"[^A-Za-z0-9.]+", "-", f"{device_name}-torch{torch_version}-{num_threads}").strip("-")
    return cache_dir() / "profiles" / f"{key}.json"


def load_profile(device_name: str, torch_version: str, num_threads: int) -> Profile | None:
    """Return the stored profile, or None where there is none, it is of an older format, or it cannot be read."""
    try:
        values: dict[str, Any] = json.loads(profile_path(device_name, torch_version, num_threads).read_text("utf-8"))
        if values.pop("version") != PROFILE_VERSION:
            return None
        return Profile(**values)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_profile(profile: Profile) -> Path | None:
    """Write the profile and return its path; None where the cache cannot be written (the profile still serves now)."""
    path = profile_path(profile.device_name, profile.torch_version, profile.num_threads)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump({"version": PROFILE_VERSION, **asdict(profile)}, file, indent=1)
        Path(file.name).replace(path)  # A reader sees the old profile or the new one, never half of one.
    except OSError:
        return None
    return path
