"""Does the device wait for the host? Marks around forward and backward, and a few steps of listening for waits.

A host that keeps up gives work faster than the device does it: it has given out forward and backward long before the
device has done them. Where both take equally long, the device had nothing queued: either the host cannot give work
fast enough, or something in the step makes it wait for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..diagnose.speed import SpeedEvidence
from ..observe.device_clock import DeviceClock, SyncListener

LISTEN_FROM = 6  # Steps that settle: compiling, first allocations, a first log.
LISTEN_STEPS = 6
MAX_PENDING = 32  # Steps whose marks the device has not passed.


class DeviceWatch:
    """Fills in what the speed doctor needs of host and device.

    Args:
        clock: Marks of the device.
        speed: Where the readings go.
        listener: Makes what tells of waits, from the function that takes their lines.
        now: The host's clock, in seconds.
    """

    def __init__(
        self,
        clock: DeviceClock,
        speed: SpeedEvidence,
        *,
        listener: Callable[[Callable[[str], None]], Any] = SyncListener,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock, self._speed, self._now = clock, speed, now
        self._listener = listener(self._note)
        self._is_listening = self._is_open = False
        self._started: tuple[float, Any] | None = None
        self._pending: deque[tuple[float, Any, Any]] = deque(maxlen=MAX_PENDING)
        self._lines: set[str] = set()
        self._step = 0

    def phase(self, phase: str) -> None:
        """Follow the loop's phases: the first forward pass opens the stretch, clipping or the update ends it."""
        if phase == "forward" and self._started is None:
            if LISTEN_FROM <= self._step < LISTEN_FROM + LISTEN_STEPS:
                self._listener.__enter__()
                self._is_listening = True
            self._started = (self._now(), self._clock.mark())
        elif phase in ("clipping", "optimizer") and self._started is not None and not self._is_open:
            self._stop_listening()  # From here on the watch itself reads values.
            begun, first = self._started
            self._pending.append((self._now() - begun, first, self._clock.mark()))
            self._is_open = True

    def border(self) -> None:
        """End a step and read the marks that the device has passed."""
        if self._is_listening:  # A step without an update.
            self._stop_listening()
        self._started, self._is_open = None, False
        self._step += 1
        while self._pending:
            host_s, first, last = self._pending[0]
            device_s = self._clock.between_s(first, last)
            if device_s is None:
                break
            self._pending.popleft()
            if self._step > LISTEN_FROM:
                self._speed.submit_s.append(host_s)
                self._speed.device_s.append(device_s)

    def close(self) -> None:
        """Stop listening, also where an exception left the loop."""
        if self._is_listening:
            self._stop_listening()

    def _note(self, line: str) -> None:
        self._lines.add(line)

    def _stop_listening(self) -> None:
        if not self._is_listening:
            return
        self._listener.__exit__(None, None, None)
        self._is_listening = False
        self._speed.listened_steps += 1
        for line in self._lines:
            self._speed.sync_lines[line] = self._speed.sync_lines.get(line, 0) + 1
        self._lines.clear()
