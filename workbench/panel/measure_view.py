"""A button beside the predicted step time: measure this device, where nobody has yet, and estimate again."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets

from ..errors import WorkbenchError
from ..events import Cancel, Progress, ProgressCallback
from ..hardware import Device
from .background import Background, Outcome
from .fields import classed, set_hidden
from .pieces import ErrorBox, ProgressLine, button
from .runs import require_no_live_session
from .texts import Say

CALIBRATE = "calibrate"


def needs_measuring(device: Device | None) -> bool:
    """Whether step times on this device are guessed although it is here: a stored calibration fills both tables."""
    return device is not None and not device.is_emulated and not (device.efficiency or device.overhead_s)


class MeasureView:
    """One line: what the step time rests on, and the button that mends it. Hidden where there is nothing to mend."""

    def __init__(self, background: Background, say: Say, *, estimate_again: Callable[[], Any]) -> None:
        """Make the view, hidden.

        Args:
            background: The one that estimates, so that no estimate disturbs what is measured.
            say: The panel's words.
            estimate_again: Called when the device has been measured.
        """
        self._background, self._say, self._estimate_again = background, say, estimate_again
        self._button = button(
            say("Measure this device"), self.measure, "wb-measure",
            tooltip=say("Time products and operators for about a minute, once for this device and PyTorch"),
        )  # fmt: skip
        self._text = widgets.HTML(
            f'<span class="wb-hint">{escape(say("The step time is guessed from a first look at this device."))}</span>'
        )
        self._row = classed(widgets.HBox((self._button, self._text)), "wb-bar-row")
        self._line = ProgressLine(lambda: background.cancel(CALIBRATE), say)
        self._error = ErrorBox()
        self.box = classed(widgets.VBox((self._row, self._line.box, self._error.box)), "wb-measuring", "wb-hidden")
        self._device: Device | None = None

    def show(self, device: Device | None) -> None:
        """Take the device that the newest estimate is for."""
        self._device = device
        set_hidden(self.box, not needs_measuring(device))

    def measure(self) -> None:
        """Measure the device, then estimate again."""
        self._error.clear()
        try:
            require_no_live_session()
        except WorkbenchError as error:
            self._error.say(str(error))
            return
        kind = "auto" if self._device is None else self._device.kind

        def work(progress: ProgressCallback, cancel: Cancel) -> Any:
            from ..hardware import calibrate_device

            return calibrate_device(progress, cancel, kind=kind)

        self._button.disabled = True
        self._line.show(Progress(CALIBRATE, message=self._say("Measuring this device")))
        self._background.submit(CALIBRATE, work, self._done, on_progress=self._line.show)

    def _done(self, outcome: Outcome) -> None:
        self._line.hide()
        self._button.disabled = False
        if outcome.was_cancelled:
            self._error.say(self._say("Cancelled. Nothing was changed."))
        elif outcome.error is not None:
            self._error.show(outcome.error, self._say("The device was not measured"))
        else:
            self._estimate_again()
