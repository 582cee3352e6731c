"""Host and device on constructed readings: who waits for whom, and where."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from workbench.diagnose.speed import SpeedEvidence, find_speed_faults
from workbench.observe.device_clock import SYNC_MESSAGE, SyncListener
from workbench.pipeline.device_watch import DeviceWatch


class Bench:
    """A host clock that moves by hand, and a device whose marks are passed at given times."""

    def __init__(self) -> None:
        self.now_s, self.device_at_s, self.lag_steps = 0.0, 0.0, 0

    def mark(self) -> float:
        return self.device_at_s

    def between_s(self, first: float, last: float) -> float | None:
        return last - first


class Heard:
    """Stands for torch's warnings: tells of the lines of the present step while it listens."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note, self.is_on = note, False

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *error: Any) -> None:
        self.is_on = False


def played(host_s: float, device_s: float, lines: Callable[[int], list[str]] = lambda step: [], steps: int = 16,
           end: str = "optimizer") -> list[Any]:  # fmt: skip
    """Return what the speed doctor says of steps whose forward and backward take so long on host and device."""
    bench, speed, heard = Bench(), SpeedEvidence(), []

    def listener(note: Callable[[str], None]) -> Heard:
        heard.append(Heard(note))
        return heard[0]

    watch = DeviceWatch(bench, speed, listener=listener, now=lambda: bench.now_s)
    for step in range(steps):
        watch.phase("forward")
        watch.phase("loss")
        watch.phase("forward")  # A second micro-batch does not begin anew.
        for line in lines(step) if heard[0].is_on else ():
            heard[0].note(line)
        bench.now_s += host_s
        bench.device_at_s += device_s
        watch.phase(end)
        assert not heard[0].is_on  # What the watch reads from here on is its own.
        watch.phase("optimizer")
        watch.border()
    watch.close()
    return find_speed_faults(speed)


def test_a_device_without_a_queue_waits_for_its_host() -> None:
    (finding,) = played(0.030, 0.0302)
    assert finding.cause == "speed.host_bound" and finding.fixes[1].changes == {"training.torch_compile": True}
    assert finding.evidence["submit_s"] == pytest.approx(0.030) and "30.2 ms" in finding.summary


@pytest.mark.parametrize("end", ["optimizer", "clipping"])
def test_a_line_that_waits_in_each_step_is_named(end: str) -> None:
    (finding,) = played(0.031, 0.031, lambda step: ["train.py:12", "train.py:12", "train.py:40"], end=end)
    assert finding.cause == "speed.sync_every_step" and finding.where["line"].startswith("train.py")
    assert finding.evidence["lines"] == ("train.py:12", "train.py:40")


@pytest.mark.parametrize(
    ("host_s", "device_s", "lines", "steps"),
    [
        (0.010, 0.050, lambda step: [], 16),  # The host runs ahead.
        (0.020, 0.050, lambda step: ["train.py:12"], 16),  # It waits once, and is ahead again when backward ends.
        (0.031, 0.031, lambda step: ["log.py:3"] if step % 5 == 0 else [], 16),  # Now and then, for a log.
        (0.031, 0.031, lambda step: [], 8),  # Too few steps.
    ],
    ids=["ahead", "one wait that costs nothing", "a wait now and then", "short"],
)
def test_nothing_is_said_where_nothing_is_wrong(host_s: float, device_s: float, lines: Any, steps: int) -> None:
    assert played(host_s, device_s, lines, steps) == []


def test_marks_that_the_device_has_not_passed_are_asked_for_again() -> None:
    bench, speed = Bench(), SpeedEvidence()
    passed = [False]
    bench.between_s = lambda first, last: last - first if passed[0] else None  # type: ignore[method-assign]
    watch = DeviceWatch(bench, speed, listener=Heard, now=lambda: bench.now_s)
    for _ in range(10):
        watch.phase("forward")
        bench.device_at_s += 0.02
        watch.phase("optimizer")
        watch.border()
    assert not speed.device_s
    passed[0] = True
    watch.border()
    assert list(speed.device_s) == pytest.approx([0.02] * 10)


def test_the_listener_takes_the_warnings_of_waits_and_leaves_the_others() -> None:
    lines: list[str] = []
    modes: list[str] = []
    with pytest.warns(UserWarning, match="something else") as others, SyncListener(lines.append, modes.append):
        for _ in range(2):
            warnings.warn(SYNC_MESSAGE, stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert modes == ["warn", "default"] and len(others) == 1
    assert len(lines) == 2 and all("test_device_watch.py:" in line for line in lines)
