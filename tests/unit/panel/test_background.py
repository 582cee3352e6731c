"""The background thread: the newest request wins, stale and less important work is cancelled."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from workbench.errors import Cancelled
from workbench.events import Progress
from workbench.panel.background import Background, Outcome


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background("test")
    yield made
    made.close()


def wait_idle(background: Background) -> None:
    deadline = time.monotonic() + 10
    while background.is_busy:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(0.02)


def test_newest_of_a_burst_wins(background: Background) -> None:
    done: list[Outcome] = []
    for number in range(20):
        background.submit("a", lambda p, c, n=number: n, done.append, delay_s=0.03)
    wait_idle(background)
    assert [outcome.value for outcome in done] == [19]


def test_a_running_job_is_cancelled_by_a_newer_one_and_its_result_dropped(background: Background) -> None:
    done: list[Outcome] = []
    started, release = threading.Event(), threading.Event()

    def slow(progress: object, cancel: object) -> str:
        started.set()
        release.wait(5)
        assert cancel.is_set  # type: ignore[attr-defined]
        return "stale"

    background.submit("a", slow, done.append)
    assert started.wait(5)
    background.submit("a", lambda p, c: "new", done.append)
    release.set()
    wait_idle(background)
    assert [outcome.value for outcome in done] == ["new"]


def test_more_important_work_interrupts_less_important(background: Background) -> None:
    done: list[str] = []
    started = threading.Event()

    def patient(progress: object, cancel: object) -> None:
        started.set()
        while True:
            cancel.check()  # type: ignore[attr-defined]
            time.sleep(0.002)

    background.submit("effects", patient, lambda outcome: done.append("effects"), priority=5)
    assert started.wait(5)
    background.submit("estimate", lambda p, c: None, lambda outcome: done.append("estimate"), priority=0)
    wait_idle(background)
    assert done == ["estimate"]


def test_less_important_work_waits_for_the_running_one(background: Background) -> None:
    order: list[str] = []
    started, release = threading.Event(), threading.Event()

    def first(progress: object, cancel: object) -> None:
        started.set()
        release.wait(5)
        order.append("estimate")

    background.submit("estimate", first, lambda outcome: None, priority=0)
    assert started.wait(5)
    background.submit("effects", lambda p, c: order.append("effects"), lambda outcome: None, priority=5)
    release.set()
    wait_idle(background)
    assert order == ["estimate", "effects"]


def test_cancel_by_the_user_is_reported(background: Background) -> None:
    done: list[Outcome] = []
    started = threading.Event()

    def patient(progress: object, cancel: object) -> None:
        started.set()
        while True:
            cancel.check()  # type: ignore[attr-defined]
            time.sleep(0.002)

    background.submit("a", patient, done.append)
    assert started.wait(5)
    background.cancel("a")
    wait_idle(background)
    assert [outcome.was_cancelled for outcome in done] == [True]
    assert done[0].error is None


def test_errors_are_handed_over_and_the_thread_lives_on(background: Background) -> None:
    done: list[Outcome] = []

    def broken(progress: object, cancel: object) -> None:
        raise SystemExit("a library wants out")

    background.submit("a", broken, done.append)
    wait_idle(background)
    background.submit("b", lambda p, c: 1, done.append)
    wait_idle(background)
    assert isinstance(done[0].error, SystemExit)
    assert done[1].value == 1


def test_a_cancelled_error_is_a_cancellation(background: Background) -> None:
    done: list[Outcome] = []

    def gives_up(progress: object, cancel: object) -> None:
        raise Cancelled("x")

    background.submit("a", gives_up, done.append)
    wait_idle(background)
    assert done == [Outcome(was_cancelled=True)]


def test_progress_is_passed_on(background: Background) -> None:
    seen: list[Progress] = []
    background.submit(
        "a", lambda progress, c: progress(Progress("trace", 1, 2)), lambda o: None, on_progress=seen.append
    )
    wait_idle(background)
    assert seen == [Progress("trace", 1, 2)]


def test_dropped_work_tells_nobody(background: Background) -> None:
    done: list[Outcome] = []
    background.submit("a", lambda p, c: 1, done.append, delay_s=0.05)
    background.drop("a")
    wait_idle(background)
    time.sleep(0.08)
    assert done == []
