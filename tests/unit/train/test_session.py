"""The session: states, buttons, failures, memory given back."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from workbench.errors import Cancelled, DataError, RecipeError, RunError, RunFolderError
from workbench.events import Progress
from workbench.train import build as build_module
from workbench.train import control, process, telemetry
from workbench.train.run_folder import RunFolder, list_checkpoints
from workbench.train.session import WAIT_HOOKS, Session

from .parts import small_recipe


def test_a_whole_run_goes_through_its_states_and_leaves_its_files(tiny):
    session = tiny(small_recipe(training__save_steps=4))
    assert session.state == "idle"
    session.start().wait(60)
    assert session.log.states == ["preparing", "running", "done"]
    assert (session.step, session.num_steps) == (6, 6)
    assert [path.name for path in list_checkpoints(session.run_dir)] == ["step-000004", "step-000006"]
    saved = {path.name for path in session.result_dir.iterdir()}
    assert session.result_dir == session.run_dir / "adapter"
    assert saved >= {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "recipe.yaml"}
    summary = session.summary()
    assert (summary["state"], summary["num_steps_done"], summary["error"]) == ("done", 6, None)
    assert summary["loss"] == session.log.of("step")[-1]["loss"]
    assert summary["eval_loss"] == session.log.of("evaluation")[-1]["eval_loss"]


def test_pause_stands_still_and_resume_goes_on(tiny, gate, monkeypatch):
    skew = [0.0]
    clock = SimpleNamespace(
        perf_counter=lambda: time.perf_counter() + skew[0], process_time=time.process_time, time=time.time
    )
    monkeypatch.setattr(control, "time", clock)
    monkeypatch.setattr(telemetry, "time", clock)
    session = tiny(small_recipe(), prepare=gate.install).start()
    gate.await_arrival()
    session.pause()
    assert session.state == "pausing"
    gate.let()
    _until(lambda: session.state == "paused")
    gate.let(50)
    count = gate.count
    time.sleep(0.2)
    assert (gate.count, session.state) == (count, "paused")
    skew[0] = 5000.0
    session.resume()
    assert session.wait(60).state == "done"
    assert session.log.states == ["preparing", "running", "pausing", "paused", "running", "done"]
    first = session.log.of("step")[0]
    assert first["step_s"] < 4000.0  # The time of standing still is no part of the step.
    assert first["elapsed_s"] < 4000.0


def test_a_pause_taken_back_in_time_never_stands_still(tiny, gate):
    session = tiny(small_recipe(), prepare=gate.install).start()
    gate.await_arrival()
    session.pause()
    session.resume()
    gate.let(50)
    session.wait(60)
    assert session.log.states == ["preparing", "running", "pausing", "running", "done"]


@pytest.mark.parametrize("save", [True, False])
def test_stop_while_paused_saves_only_when_asked(tiny, gate, save):
    session = tiny(small_recipe(), prepare=gate.install).start()
    gate.let(2)
    gate.await_arrival(3)
    session.pause()
    gate.let(10)
    _until(lambda: session.state == "paused")
    session.stop(save=save)
    assert session.state == "stopping"
    session.wait(60)
    assert session.state == "stopped"
    assert bool(list_checkpoints(session.run_dir)) is save
    assert (session.result_dir is not None) is save
    session.stop()
    assert session.state == "stopped"


def test_stop_before_the_first_step_ends_without_a_checkpoint(tiny, gate):
    session = tiny(small_recipe(), prepare=gate.install).start()
    gate.await_arrival()
    session.stop()
    gate.let(5)
    session.wait(60)
    assert (session.state, session.step, session.result_dir) == ("stopped", 0, None)
    assert not list_checkpoints(session.run_dir)


def test_preparation_can_be_cancelled_and_shows_progress(tiny, monkeypatch):
    session = tiny(small_recipe())
    entered = threading.Event()

    def slow(recipe, device, *, progress, cancel):
        progress(Progress("tokenize", 1, 3, "Tokenizing"))
        entered.set()
        for _ in range(1000):
            cancel.check()
            time.sleep(0.01)
        raise AssertionError("not cancelled")

    monkeypatch.setattr(build_module, "build_run", slow)
    session.start()
    assert entered.wait(10)
    assert session.progress == Progress("tokenize", 1, 3, "Tokenizing")
    session.stop()
    session.wait(10)
    assert session.log.states == ["preparing", "stopping", "stopped"]
    assert session.error is None


def test_buttons_on_a_run_that_is_not_live_say_so(tiny):
    session = tiny(small_recipe(training__max_steps=1))
    with pytest.raises(RunError, match="idle and cannot be paused"):
        session.pause()
    with pytest.raises(RunError, match="not started"):
        session.wait()
    session.start().wait(60)
    with pytest.raises(RunError, match="done and cannot be resumed"):
        session.resume()
    with pytest.raises(RunError, match="cannot be started again"):
        session.start()


def test_a_second_run_in_the_process_is_refused_until_the_first_ended(tiny, gate):
    first = tiny(small_recipe(), run_dir="first", prepare=gate.install).start()
    second = tiny(small_recipe(), run_dir="second")
    with pytest.raises(RunError, match=r"One process trains one run at a time"):
        second.start()
    assert second.state == "idle"
    assert not second.run_dir.exists()
    gate.let(100)
    first.wait(60)
    assert second.start().wait(60).state == "done"
    assert process.live_session() is None


def test_a_folder_in_use_is_refused_and_nothing_stays_live(tiny, tmp_path):
    other = RunFolder.create(small_recipe(), tmp_path / "run")
    session = tiny(small_recipe())
    with pytest.raises(RunFolderError, match="in use by another run of this process"):
        session.start()
    assert process.live_session() is None
    other.release()


def test_contradicting_settings_are_refused_before_anything_happens(tiny):
    session = tiny(small_recipe(quantization__load_in_4bit=True, adapter__method="none"))
    with pytest.raises(RecipeError, match=r"adapter\.method"):
        session.start()
    assert not session.run_dir.exists()
    assert process.live_session() is None


def test_what_the_emulated_card_refuses_is_refused(tiny):
    session = tiny(small_recipe(hardware__emulate="Tesla T4", training__mixed_precision="bf16"))
    with pytest.raises(RecipeError, match="Tesla T4 does not compute bfloat16 natively"):
        session.start()
    assert session.state == "idle"


def test_a_failure_is_an_event_a_state_and_a_run_error(tiny):
    def break_it(run):
        run.model.register_forward_pre_hook(_raise)

    session = tiny(small_recipe(), prepare=break_it).start()
    with pytest.raises(RunError, match=r"The run failed \(ZeroDivisionError: <b>boom</b>\)") as info:
        session.wait(60)
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    assert session.state == "failed"
    error = session.log.of("error")[0]
    assert error["kind"] == "ZeroDivisionError"
    assert "in _raise" in error["traceback"]
    assert session.log.states == ["preparing", "running", "failed"]
    with pytest.raises(RunError) as again:
        session.wait()
    assert again.value is not info.value


def _raise(*args):
    raise ZeroDivisionError("<b>boom</b>")


def test_errors_of_the_workbench_keep_their_words(tiny, monkeypatch):
    session = tiny(small_recipe())

    def fail(*args, **kwargs):
        raise DataError("rows.jsonl, line 3: not JSON. Correct that line.")

    monkeypatch.setattr(build_module, "build_run", fail)
    with pytest.raises(RunError, match=r"^rows\.jsonl, line 3: not JSON\. Correct that line\.$") as info:
        session.start().wait(60)
    assert isinstance(info.value.__cause__, DataError)


def test_running_out_of_memory_says_what_to_change(tiny):
    def hook(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    session = tiny(small_recipe(), prepare=lambda run: run.model.register_forward_pre_hook(hook)).start()
    with pytest.raises(RunError, match=r"Out of memory .*Halve training\.per_device_train_batch_size"):
        session.wait(60)


@pytest.mark.parametrize("ending", ["done", "stopped", "failed"])
def test_all_memory_is_given_back(tiny, gate, ending):
    kept = []

    def prepare(run):
        kept.append(weakref.ref(run.model))
        kept.append(weakref.ref(run.optimizer))
        kept.extend(weakref.ref(parameter.untyped_storage()) for parameter in run.model.parameters())
        if ending == "failed":
            run.model.register_forward_hook(_raise)
        if ending == "stopped":
            gate.install(run)

    session = tiny(small_recipe(training__max_steps=2), prepare=prepare).start()
    if ending == "stopped":
        gate.let(2)
        gate.await_arrival(3)
        session.stop()
        gate.let()
    assert session.finished.wait(60)
    assert session.state == ending
    gc.collect()
    assert len(kept) > 10
    alive = [type(reference()).__name__ for reference in kept if reference() is not None]
    assert alive == []
    if ending == "failed":
        assert session.error is not None  # The exception is still there; its frames hold nothing.


def test_switch_interval_is_put_back(tiny, gate):
    before = sys.getswitchinterval()
    session = tiny(small_recipe(training__max_steps=1), prepare=gate.install).start()
    gate.await_arrival()
    during = sys.getswitchinterval()
    gate.let(10)
    session.wait(60)
    assert during == pytest.approx(process.SWITCH_INTERVAL_S, rel=0.01)
    assert sys.getswitchinterval() == before


def test_thread_local_settings_of_the_caller_do_not_reach_the_run(tiny):
    with torch.no_grad():
        session = tiny(small_recipe(training__max_steps=1)).start().wait(60)
    assert session.state == "done"


def test_an_observer_or_meter_that_fails_is_left_out_and_the_run_goes_on(tiny):
    class Broken:
        calls = 0

        def on_event(self, event):
            Broken.calls += 1
            raise ValueError("no")

        def start(self):
            pass

        def measure_step(self):
            raise ValueError("no reading")

        def stop(self):
            pass

    session = tiny(small_recipe(training__max_steps=2), observers=[Broken()], meters=[Broken()]).start().wait(60)
    assert session.state == "done"
    assert Broken.calls == 1
    messages = [data["message"] for data in session.log.of("log")]
    assert len(messages) == 2
    assert all(message.startswith("Broken failed (ValueError") for message in messages)


def test_meters_join_the_row(tiny):
    class Meter:
        def __init__(self):
            self.calls = []

        def start(self):
            self.calls.append("start")

        def measure_step(self):
            self.calls.append("step")
            return {"allocated_bytes": 7.0}

        def stop(self):
            self.calls.append("stop")

    meter = Meter()
    session = tiny(small_recipe(training__max_steps=2), meters=[meter]).start().wait(60)
    assert meter.calls == ["start", "step", "step", "stop"]
    assert [row["allocated_bytes"] for row in session.log.of("step")] == [7.0, 7.0]


def test_an_interrupt_while_waiting_stops_saves_and_is_passed_on(tiny, gate):
    session = tiny(small_recipe(), prepare=gate.install).start()
    gate.let(2)
    gate.await_arrival(3)
    fired = []

    def interrupt():
        if not fired:
            fired.append(1)
            gate.let()
            raise KeyboardInterrupt

    WAIT_HOOKS.append(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.wait(60)
    finally:
        WAIT_HOOKS.remove(interrupt)
    assert (session.state, session.step) == ("stopped", 1)
    assert list_checkpoints(session.run_dir)


def test_waiting_with_a_limit_returns_while_the_run_goes_on(tiny, gate):
    session = tiny(small_recipe(), prepare=gate.install).start()
    assert session.wait(0.1).state in ("preparing", "running")
    gate.let(100)
    session.wait(60)


def test_the_end_of_the_process_stops_and_saves_a_live_run(tiny, gate, caplog):
    session = tiny(small_recipe(), prepare=gate.install).start()
    gate.let(2)
    gate.await_arrival(3)
    threading.Timer(0.2, gate.let, (5,)).start()
    process._stop_at_exit(session)
    assert session.state == "stopped"
    assert list_checkpoints(session.run_dir)
    assert "stopping and saving" in caplog.text


def test_cancelled_is_no_failure(tiny, monkeypatch):
    session = tiny(small_recipe())
    monkeypatch.setattr(build_module, "build_run", lambda *args, **kwargs: (_ for _ in ()).throw(Cancelled("x")))
    assert session.start().wait(60).state == "stopped"


def test_a_session_makes_a_folder_of_its_own_name_below_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = Session(small_recipe(model__name_or_path="org/My model")).run_dir.as_posix()
    assert name.startswith("runs/")
    assert "-My-model-" in name


def _until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_observer_may_press_buttons_while_others_press_them(tiny):
    class Presser:
        def __init__(self):
            self.session = None

        def on_event(self, event):
            if event.kind == "step":
                time.sleep(0.01)
                self.session.pause()
                self.session.resume()

    presser = Presser()
    session = tiny(small_recipe(), observers=[presser])
    presser.session = session
    session.start()
    while session.state in ("preparing", "running", "pausing", "paused"):
        with contextlib.suppress(RunError):
            session.pause()
            session.resume()
        time.sleep(0.002)
    assert session.wait(30).state == "done"
