"""What watches of trainers share: the Watch comes when training begins, and a second training brings another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..diagnose.finding import Finding
from ..events import Observer
from .live_view import Displayed
from .watching import Watch


class OuterWatch(Displayed):
    """Findings, report and observers of a Watch that does not exist before training begins.

    Attributes:
        watch: The Watch of the newest training, or None before the first.
    """

    # What the user calls to begin, for the report before it.
    begins_with = "train"

    def __init__(self, limit: str | int | None, look: str, observers: Sequence[Observer]) -> None:
        self.watch: Watch | None = None
        self._options: dict[str, Any] = {"limit": limit, "look": look}
        self._observers = list(observers)
        self._before: list[Finding] = []

    @property
    def findings(self) -> list[Finding]:
        """Faults found so far."""
        return self._before + (self.watch.findings if self.watch is not None else [])

    @property
    def memory_verdict(self) -> Finding | None:
        """What the last deep look said."""
        return self.watch.memory_verdict if self.watch is not None else None

    def report(self) -> str:
        """Return everything found as text."""
        return self.watch.report() if self.watch is not None else f"{self.begins_with}() has not been called yet."

    def add_observer(self, observer: Observer) -> None:
        """Let an observer have the events of this training and of later ones."""
        self._observers.append(observer)
        if self.watch is not None:
            self.watch.add_observer(observer)
