"""Killed with SIGKILL, also while it saves, a run ends as one that was never interrupted."""

from __future__ import annotations

import re
import subprocess
import sys

from benchmarks.kills import SAVE_STEPS


def test_three_kills_change_nothing() -> None:
    """In a process of its own: the benchmark forks, which is safe where nothing was computed before."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.kills", "--kills", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    saving = re.match(r"3 kills, (\d) of them while a checkpoint was half written", done.stdout)
    assert saving is not None and int(saving[1]) >= 1
    assert f"checkpoints every {SAVE_STEPS}." in done.stdout and "all equal to the uninterrupted one." in done.stdout
