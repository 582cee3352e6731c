"""Sessions over the tiny run."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from workbench.train import build as build_module
from workbench.train.session import Session

from ..components.tiny import CPU
from .parts import Log, build_tiny_run


@pytest.fixture(scope="module", autouse=True)
def older_objects_stand_aside():
    """Keep what is alive before a file out of its collections: a run makes several, each a second after 2,000 tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread():
    """Compute in one thread: on a busy machine threads of tiny products mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Return a function that makes a Session over the tiny model; ``prepare`` may change the run before it starts."""
    sessions = []

    def make(recipe, *, run_dir="run", prepare=None, num_samples=22, precision=None, **options):
        def build_run(recipe, device, *, progress, cancel):
            run = build_tiny_run(recipe, tmp_path / "model", num_samples=num_samples, precision=precision)
            if prepare is not None:
                prepare(run)
            return run

        monkeypatch.setattr(build_module, "build_run", build_run)
        log = Log()
        where = None if run_dir is None else tmp_path / run_dir
        session = Session(recipe, run_dir=where, observers=[log, *options.pop("observers", ())], device=CPU, **options)
        session.log = log
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session.stop(save=False)
        if session.state != "idle":
            assert session.finished.wait(30)


class Gate:
    """Lets the training thread do ``steps`` micro-steps, then holds it until more are allowed."""

    def __init__(self):
        self.count = 0
        self._allowed = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)

    def install(self, run):
        run.model.register_forward_pre_hook(lambda *args: self._pass())

    def _pass(self):
        self.count += 1
        self._arrived.release()
        assert self._allowed.acquire(timeout=30)

    def let(self, passes=1):
        for _ in range(passes):
            self._allowed.release()

    def await_arrival(self, arrivals=1):
        for _ in range(arrivals):
            assert self._arrived.acquire(timeout=30)


@pytest.fixture
def gate():
    return Gate()
