"""What one optimizer step says about itself: time, tokens, meters."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..events import Event, Meter, Observer
from ..hardware import Device
from ..recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

COUNTS = "counts"
# Column of a training sample's number; held-out ones have none.
ROW = "row"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of some micro-batches, and the numbers of their training samples."""

    real: int = 0
    padding: int = 0
    supervised: int = 0
    rows: tuple[int, ...] = ()

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.real + other.real,
            self.padding + other.padding,
            self.supervised + other.supervised,
            self.rows + other.rows,
        )


class CountingCollator:
    """A collator that counts tokens while they are still on the CPU, where counting does not wait for a GPU."""

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]]) -> None:
        self._collator = collator

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        batch = self._collator(samples)
        count = getattr(self._collator, "count", None)
        counts = count_tokens(batch) if count is None else _summed(count(batch))
        rows = tuple(int(sample[ROW]) for sample in samples if ROW in sample)
        return {**batch, COUNTS: replace(counts, rows=rows)}


def count_tokens(batch: Mapping[str, Tensor]) -> TokenCounts:
    """Return the tokens of a batch: real, padding, and supervised."""
    from ..components.collator import count_tokens

    return _summed(count_tokens(batch))


def _summed(counts: Any) -> TokenCounts:
    return TokenCounts(counts.num_tokens, counts.num_padding_tokens, counts.num_supervised_tokens)


class StepClock:
    """Times steps; pauses, evaluations and saves between them are not part of a step."""

    def __init__(self, elapsed_s: float = 0.0) -> None:
        """Make a clock.

        Args:
            elapsed_s: Seconds that the run took before it was resumed.
        """
        self._elapsed_before_s = elapsed_s
        self._first: float | None = None
        self._step_start = 0.0
        self._cpu_start = 0.0
        self._step_pause_s = 0.0
        self._total_pause_s = 0.0

    def begin_step(self) -> None:
        """Note the begin of a step, before its data is fetched."""
        self._step_start, self._cpu_start = time.perf_counter(), time.process_time()
        self._step_pause_s = 0.0
        if self._first is None:
            self._first = self._step_start

    def add_pause(self, seconds: float) -> None:
        """Leave seconds of standing still out of the step and of the elapsed time."""
        self._step_pause_s += seconds
        self._total_pause_s += seconds

    def end_step(self) -> float:
        """Return the seconds of the step that ends now."""
        return time.perf_counter() - self._step_start - self._step_pause_s

    def busy_fraction(self, step_s: float, num_threads: int) -> float | None:
        """Return the share of the step's threads that computed; None of a step without length.

        Args:
            step_s: What ``end_step`` returned.
            num_threads: Threads that torch computes with.
        """
        busy_s = time.process_time() - self._cpu_start
        return min(1.0, busy_s / (step_s * max(1, num_threads))) if step_s > 0 else None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first step began, pauses left out, earlier parts of a resumed run counted in."""
        if self._first is None:
            return self._elapsed_before_s
        return self._elapsed_before_s + time.perf_counter() - self._first - self._total_pause_s


class Publisher:
    """Hands events to observers and collects meters. One that fails is dropped: watching must never end a run."""

    def __init__(self, observers: Sequence[Observer] = (), meters: Sequence[Meter] = ()) -> None:
        # Buttons publish changes of state from threads of their own. The session guards its state with the same lock:
        # with two, an observer that presses a button and a button that publishes would wait for each other.
        self.lock = threading.RLock()
        self._observers = list(observers)
        self._meters = list(meters)

    def add_observer(self, observer: Observer) -> None:
        """Hand events to one more observer."""
        self._observers.append(observer)

    def add_meter(self, meter: Meter) -> None:
        """Ask one more meter at the end of each step."""
        self._meters.append(meter)

    def publish(self, event: Event) -> None:
        """Hand an event to every observer; events of several threads come one after the other."""
        with self.lock:
            for observer in tuple(self._observers):
                try:
                    observer.on_event(event)
                except Exception as error:
                    self._observers.remove(observer)
                    self.publish(_dropped(observer, error))

    def start_meters(self) -> None:
        """Begin measuring."""
        self._each_meter(lambda meter: meter.start())

    def stop_meters(self) -> None:
        """End measuring."""
        self._each_meter(lambda meter: meter.stop())

    def measure(self) -> dict[str, float]:
        """Return the values of every meter for the step just ended."""
        values: dict[str, float] = {}
        self._each_meter(lambda meter: values.update(meter.measure_step()))
        return values

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Tell meters that count storages of tensors that no operator made, such as a state read from a file.

        Raises:
            torch.OutOfMemoryError: They have no room on an emulated card.
        """
        kept = list(tensors)
        for meter in self._meters:
            adopt = getattr(meter, "adopt", None)
            if adopt is not None:
                adopt(kept)

    def _each_meter(self, action: Callable[[Meter], None]) -> None:
        for meter in tuple(self._meters):
            try:
                action(meter)
            except Exception as error:
                self._meters.remove(meter)
                self.publish(_dropped(meter, error))


def _dropped(part: object, error: Exception) -> Event:
    text = f"{type(part).__name__} failed ({type(error).__name__}: {error}) and is left out for the rest of the run."
    return Event("log", {"message": text})


def price_per_hour_usd(recipe: Recipe, device: Device) -> float | None:
    """Return what all devices of a run cost an hour; None where neither the Recipe nor the device table knows.

    Args:
        recipe: Its own price comes first.
        device: The device, or the one the run pretends to be; of its dated offers the lowest counts.
    """
    price = recipe.cost.price_per_hour_usd
    if price is None and device.price_per_hour_usd is not None:
        price = device.price_per_hour_usd[0]
    return None if price is None else price * recipe.sharding.num_processes


def is_finite(*values: float) -> bool:
    """Whether none of the values is NaN or Inf."""
    return all(math.isfinite(value) for value in values)
