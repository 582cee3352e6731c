"""Session: one run in a worker thread, so that buttons and other cells keep working.

::

    idle -> preparing -> running <-> pausing -> paused
                |           |           |         |
                +-----------+-----+-----+---------+
                                  v
                              stopping -> stopped        (running) -> done        (anything) -> failed
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Cancelled, NonFiniteError, Problem, RecipeError, RunError
from ..events import LIVE_STATES, Cancel, Event, Meter, Observer, Progress
from ..hardware import Device, read_device, target_device
from ..recipe import Recipe, require_valid
from ..recipe.locations import is_url
from . import process
from .control import Control, StopRequested
from .explain import as_run_error, is_out_of_memory, sentence_of
from .process import live_session as live_session
from .ranks import RankWatch, for_ranks, join_ranks, leave_ranks, read_ranks
from .run_folder import RECIPE, RunFolder, find_checkpoint, new_path
from .teardown import chain_of, collect_memory, drop_frames, let_go
from .telemetry import Publisher

if TYPE_CHECKING:
    from .upload import Uploader

# What a kernel without subshells has to do while a cell waits, so that buttons work; the panel adds to it.
WAIT_HOOKS: list[Callable[[], object]] = []


class Session:
    """One training run: start, pause, resume, stop, wait.

    Everything but ``wait`` returns at once; the training thread obeys at its next micro-step border.

    Example:
        >>> session = Session(Recipe()).start()   # doctest: +SKIP
        >>> session.wait().state                  # doctest: +SKIP
        'done'

    Attributes:
        recipe: What runs.
        run_dir: The run's folder.
        error: What made the run fail, or None.
        error_traceback: Its traceback as text; the exception itself holds no frames any more.
        rescued: Where a run that failed can go on: one sentence; empty where nothing was rescued.
        num_steps: Optimizer steps of the whole run; None until the data is prepared.
        step: Optimizer steps done.
        progress: The newest progress of fetching, loading, tokenizing, evaluating or saving; None before the first.
        history: Set by ``pipeline.start_session``; None for a bare session.
        result_dir: ``adapter/`` or ``model/`` once it is saved, else None.
        finished: Set when the run has ended and its memory is given back.
        ranks: Which of how many processes this is.
        main_dir: The run folder of rank 0; others record below it.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        run_dir: str | Path | None = None,
        resume_from: str | Path | None = None,
        observers: Sequence[Observer] = (),
        meters: Sequence[Meter] = (),
        device: Device | None = None,
        begins_again: bool = False,
    ) -> None:
        """Make a session; nothing happens before ``start``.

        Args:
            recipe: What to run.
            run_dir: The run's folder; None makes a new one below ``./runs``, or continues in the one resumed from.
            resume_from: A run folder (its last checkpoint), a checkpoint, or a URL that ``training.upload_to`` was:
                its newest whole checkpoint is fetched into a new run folder.
            observers: Receive every event.
            meters: Measure each step.
            device: The device to run on; None reads this machine's.
            begins_again: ``run_dir`` holds a run that ended before its first checkpoint: begin it again there.

        Raises:
            RunFolderError: ``resume_from`` has no checkpoint.
            RecipeError: The URL holds credentials, or no installed package can open it.
        """
        self.recipe = recipe
        self._checkpoint: Path | None = None
        self._continues = begins_again
        self._uploader: Uploader | None = None
        if is_url(resume_from):
            from .download import fetch_run

            resume_from, run_dir = fetch_run(str(resume_from), run_dir), None
        if resume_from is not None:
            resumed_dir, self._checkpoint = find_checkpoint(resume_from)
            self._continues = run_dir is None or Path(run_dir).resolve() == resumed_dir.resolve()
            run_dir = resumed_dir if self._continues else run_dir
        self.ranks = read_ranks()
        if self.ranks.size > 1 and run_dir is None:
            raise RunError("Several processes need one run folder for all of them. Add --out DIR.")
        self.main_dir = Path(run_dir) if run_dir is not None else new_path(recipe)
        self.run_dir = self.ranks.folder(self.main_dir)
        if not self.ranks.is_main:
            self._continues = (self.run_dir / RECIPE).is_file()
        self.error: BaseException | None = None
        self.error_traceback = ""
        self.rescued = ""
        self.num_steps: int | None = None
        self.step = 0
        self.progress: Progress | None = None
        self.history: Any = None
        self.result_dir: Path | None = None
        self._device = device
        self._state = "idle"
        self._publisher = Publisher([_Position(self), *observers], meters)
        self._state_lock = self._publisher.lock
        self._control = Control(self._stood_still)
        self._cancel = Cancel()
        self._saves_on_stop = True
        self._newest: dict[str, float] = {}
        self._pruning: dict[str, Any] | None = None
        self.finished = threading.Event()
        self._thread: threading.Thread | None = None

    # -- what a user calls -----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One of RUN_STATES."""
        return self._state

    def add_observer(self, observer: Observer) -> None:
        """Hand events to one more observer; before ``start``."""
        self._publisher.add_observer(observer)

    def publish(self, event: Event) -> None:
        """Hand one event to every observer."""
        self._publisher.publish(event)

    def add_meter(self, meter: Meter) -> None:
        """Measure with one more meter; before ``start``."""
        self._publisher.add_meter(meter)

    def start(self) -> Session:
        """Start the run in its thread and return.

        Raises:
            RecipeError: The settings contradict each other or the device.
            DeviceError: The device is not there.
            RunFolderError: The run folder is in use or cannot be written.
            RunError: This session was started before, or another run is live in this process.
        """
        if self._state != "idle":
            raise RunError(f"This session is {self._state} and cannot be started again. Make a new Session.")
        device = self._device or read_device(self.recipe.hardware.device)
        if device.kind == "mps":
            field = Problem("hardware.device", f"{device.name} cannot train here.", (("hardware.device", "cpu"),))
            raise RecipeError([field])
        self._fit_to_ranks()
        require_valid(self.recipe, device.facts(for_estimate=False))
        if self.recipe.hardware.emulate and not device.has_caching_allocator:
            # What the card that it pretends to be refuses is refused here too.
            require_valid(self.recipe, target_device(self.recipe).facts(for_estimate=True))
        self._open_store()
        process.become_live(self)
        try:
            folder = self._open_folder()
            self._set_state("preparing")
            self._thread = threading.Thread(
                target=self._run_thread, args=(device, folder), name="workbench-training", daemon=True
            )
            self._thread.start()
        except BaseException:
            self._state = "idle"
            process.end_live(self)
            raise
        return self

    def _open_store(self) -> None:
        """Make ready to upload what the run saves, where the Recipe asks for it.

        Raises:
            RecipeError: No installed package knows this kind of URL.
        """
        if self.recipe.training.upload_to is None or not self.ranks.is_main:
            return
        from .upload import Uploader

        self._uploader = Uploader(self.recipe, self.run_dir, self._publisher.publish)
        self.add_observer(self._uploader)  # After the recorder, which writes the rows that go with a checkpoint.

    def _fit_to_ranks(self) -> None:
        """Make the Recipe say how many processes there are.

        Raises:
            RecipeError: The Recipe asks for several, and this is one alone; or a step cannot be shared by so many.
        """
        size, wanted = self.ranks.size, self.recipe.sharding.num_processes
        if size == wanted:
            return
        if self._checkpoint is not None:
            self.recipe = for_ranks(self.recipe, size)
        elif wanted == 1:
            self.recipe = self.recipe.with_changes({"sharding.num_processes": size})
        else:
            text = f"{wanted} processes are asked for, and {size} started. Start them with: workbench launch."
            raise RecipeError([Problem("sharding.num_processes", text, (("sharding.num_processes", size),))])

    def pause(self) -> None:
        """Ask the run to stand still at its next micro-step; device memory stays.

        Raises:
            RunError: The run is not live.
        """
        self._require_live("paused")
        with self._state_lock:
            self._control.pause()
            if self._state == "running":
                self._set_state("pausing")

    def resume(self) -> None:
        """Ask a paused run to go on.

        Raises:
            RunError: The run is not live.
        """
        self._require_live("resumed")
        with self._state_lock:
            self._control.resume()
            if self._state in ("pausing", "paused"):
                self._set_state("running")

    def stop(self, *, save: bool = True) -> None:
        """Ask the run to stop; nothing happens when it has ended.

        Args:
            save: Write a checkpoint and the adapter (or model) of the last finished step.
        """
        with self._state_lock:
            if self._state not in LIVE_STATES:
                return
            self._saves_on_stop = save
            self._cancel.set()
            self._control.stop()
            if self._state != "stopping":
                self._set_state("stopping")

    def wait(self, timeout_s: float | None = None) -> Session:
        """Wait until the run has ended, or for ``timeout_s`` seconds.

        An interrupt (Ctrl-C, or the kernel's stop button) stops the run at its next micro-step border and saves it; a
        second one gives up waiting.

        Raises:
            RunError: The run failed; ``__cause__`` is the original.
            KeyboardInterrupt: It was interrupted; the run has stopped and is saved.
        """
        if self._state == "idle":
            raise RunError("This session was not started. Call start() first.")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        interrupted = False
        while True:
            try:
                if self.finished.wait(0.05) or (deadline is not None and time.monotonic() >= deadline):
                    break
                for hook in tuple(WAIT_HOOKS):
                    hook()
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self.stop(save=True)
        if self._state == "failed" and self.error is not None:
            raise as_run_error(self.error, self.failure_text())
        if interrupted:
            raise KeyboardInterrupt
        return self

    def summary(self) -> dict[str, Any]:
        """Return where the run stands, as plain JSON values."""
        return {
            "state": self._state,
            "run_dir": str(self.run_dir),
            "result_dir": str(self.result_dir) if self.result_dir else None,
            "num_steps_done": self.step,
            "num_steps": self.num_steps,
            "loss": self._newest.get("loss"),
            "eval_loss": self._newest.get("eval_loss"),
            "elapsed_s": self._newest.get("elapsed_s"),
            "gradient_error": self._newest.get("gradient_error"),
            "pruning": self._pruning,
            "error": self.failure_text() or None,
        }

    def __repr__(self) -> str:
        steps = f"{self.step} of {self.num_steps}" if self.num_steps else str(self.step)
        return f"<Session {self._state}, step {steps}, {self.run_dir}>"

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run_thread(self, device: Device, folder: RunFolder) -> None:
        outcome, error = "failed", None
        try:
            with process.run_settings(self.recipe, device):
                self._publisher.start_meters()
                try:
                    outcome = self._prepare_and_train(device, folder)
                finally:
                    self._publisher.stop_meters()
        except (StopRequested, Cancelled):
            outcome = "stopped"  # Before the first step: there is nothing to save.
        except BaseException as caught:  # Also SystemExit and the like: in a thread they would vanish.
            error = caught
        if error is not None:
            self._keep_error(error)
            collect_memory()
            self._ask(self._judge_failure)
            data = {"sentence": self.failure_text(), "kind": type(error).__name__, "traceback": self.error_traceback}
            self._publisher.publish(Event("error", data))
        collect_memory()
        if self._uploader is not None:
            self._tell(Progress("upload", 0, 1, "Waiting for the last upload"))
            self._ask(self._uploader.finish)
        with self._state_lock:
            self._set_state(outcome)
            folder.release()
            process.end_live(self)
            self.finished.set()

    def _prepare_and_train(self, device: Device, folder: RunFolder) -> str:
        """Run from the first stage to the saved result; return the final state."""
        import torch

        from ..components.libraries import load_libraries

        load_libraries()  # Another thread (an estimate) may be importing them just now.
        from ..components.starting import start_notes
        from .rescue import rescue

        # Thread-local in torch; in a new thread they are at their defaults, whatever the notebook has set.
        torch.set_grad_enabled(True)
        if device.has_caching_allocator:
            torch.cuda.set_device(torch.cuda.current_device())
        if self.ranks.size > 1:
            join_ranks(self.ranks, device, self.recipe.sharding.timeout_s)
        run: Any = None
        engine: Any = None
        try:
            run = self._build(device)
            for note in start_notes(self.recipe):
                self._publisher.publish(Event("log", {"message": note}))
            self.num_steps = run.num_steps
            engine = self._make_engine(run, device, folder)
            with self._state_lock:
                if self._state == "preparing":
                    self._set_state("running")
            return self._train_and_save(run, engine, folder)
        except Exception as error:
            self._ask(functools.partial(self._look_at_failure, error, run, engine))
            if engine is not None and (is_out_of_memory(error) or isinstance(error, NonFiniteError)):
                self._keep_error(error)  # Its frames hold what filled the memory, and saving needs some.
                self.rescued = rescue(engine, folder.path)
            raise

    def _make_engine(self, run: Any, device: Device, folder: RunFolder) -> Any:
        from .arguments import training_arguments

        has_experts = any("expert" in name for name, _ in run.model.named_modules())
        arguments = training_arguments(self.recipe, device, folder.path, has_experts=has_experts)
        parts = (run, arguments, folder, self._control, self._publisher)
        if self.ranks.size == 1:
            from .engine import Engine

            return Engine(*parts)
        from .ranked_engine import RankedEngine

        watch = RankWatch(self.ranks, self.recipe.sharding.timeout_s, self._give_up)
        return RankedEngine(parts, ranks=self.ranks, main_dir=self.main_dir, watch=watch)

    def _give_up(self, sentence: str) -> None:
        """End a run whose training thread waits for another rank and cannot be woken; called by the watch."""
        self.error, self.error_traceback = RunError(sentence), ""
        data = {"sentence": sentence, "kind": "RunError", "traceback": ""}
        self._publisher.publish(Event("error", data))
        with self._state_lock:
            self._set_state("failed")
            process.end_live(self)
            self.finished.set()

    def _train_and_save(self, run: Any, engine: Any, folder: RunFolder) -> str:
        outcome = "done"
        try:
            engine.train(resume_from_checkpoint=str(self._checkpoint) if self._checkpoint else None)
            engine.use_best_weights()
            engine.pruner.at_end(engine.state.global_step)
        except StopRequested:
            outcome = "stopped"
        if outcome == "done" or (self._saves_on_stop and engine.state.global_step > 0):
            engine.save_checkpoint()
            if self.ranks.is_main:
                self.result_dir = self._save_result(run, folder, engine.pruner)
                if self._uploader is not None:
                    self._ask(functools.partial(self._uploader.add_result, self.result_dir))
        engine.close()
        if self.ranks.size > 1:
            leave_ranks()
        return outcome

    def _build(self, device: Device) -> Any:
        """Build what the run is made of."""
        from .build import build_run

        return build_run(self.recipe, device, progress=self._tell, cancel=self._cancel)

    # -- when it fails; the pipeline's session says more -----------------------------------------------------------

    def _look_at_failure(self, error: BaseException, run: Any, engine: Any) -> None:
        """Called in the training thread while the frames of ``error`` still hold what failed."""

    def _judge_failure(self) -> None:
        """Called in the training thread when the memory is given back."""

    def _ask(self, doctor: Callable[[], object]) -> None:
        """Ask a doctor; one that fails must neither hide the error it was asked about nor keep the run from ending."""
        try:
            doctor()
        except Exception as error:
            text = f"Explaining the failure failed ({type(error).__name__}: {error}); the failure itself is below."
            self._publisher.publish(Event("log", {"message": text}))

    def failure_text(self) -> str:
        """Return what a person needs to know of the failure; empty where there was none."""
        return sentence_of(self.error) if self.error is not None else ""

    def _keep_error(self, error: BaseException) -> None:
        """Keep an error without its frames; its traceback, as text, only the first time: later it is cut off."""
        if self.error is error:
            for link in chain_of(error):
                let_go(link)
            return
        self.error, self.error_traceback = error, drop_frames(error)

    def _save_result(self, run: Any, folder: RunFolder, pruner: Any) -> Path:
        """Write ``adapter/`` or ``model/`` with tokenizer and Recipe: all that using it takes."""
        from ..components.processor import save_processor
        from .checkpoint import is_adapter, save_weights

        name = "adapter" if is_adapter(run.model) else "model"
        self._tell(Progress("save", 0, 1, f"Saving the {name}"))
        with folder.write_directory(name) as temporary:
            save_weights(run.model, temporary)
            pruner.save(temporary)
            save_processor(run.tokenizer, temporary)
            if run.data.classes:  # An adapter has no config that would name them.
                (temporary / "classes.json").write_text(json.dumps(list(run.data.classes)), encoding="utf-8")
            (temporary / "recipe.yaml").write_text(self.recipe.to_yaml(), encoding="utf-8")
        self._tell(Progress("save", 1, 1, f"Saved the {name}"))
        return folder.path / name

    def _open_folder(self) -> RunFolder:
        if not self._continues:
            return RunFolder.create(self.recipe, self.run_dir)
        folder = RunFolder.reopen(self.run_dir)
        try:
            folder.write_text("recipe.yaml", self.recipe.to_yaml())
        except BaseException:
            folder.release()
            raise
        return folder

    # -- events ----------------------------------------------------------------------------------------------------

    def _tell(self, progress: Progress) -> None:
        data = {"stage": progress.stage, "done": progress.done, "total": progress.total, "message": progress.message}
        self._publisher.publish(Event("progress", data))

    def _stood_still(self, paused: bool) -> None:
        """Called by the training thread when it starts and ends standing still."""
        with self._state_lock:
            if paused and self._state in ("running", "pausing"):
                self._set_state("paused")

    def _set_state(self, state: str) -> None:
        self._state = state
        data: dict[str, Any] = {"state": state, "step": self.step, "num_steps": self.num_steps}
        if state == "preparing":
            data["run_dir"] = str(self.run_dir)
            data["resumed_from"] = str(self._checkpoint) if self._checkpoint else None
        self._publisher.publish(Event("state", data))

    def _require_live(self, wish: str) -> None:
        if self._state not in LIVE_STATES:
            raise RunError(f"The run is {self._state} and cannot be {wish}. Start a new one.")


class _Position:
    """An Observer that keeps the session's own counters."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_event(self, event: Event) -> None:
        if event.kind == "step":
            self._session.step = int(event.data["step"])
            self._session._newest |= {name: event.data[name] for name in ("loss", "elapsed_s") if name in event.data}
        elif event.kind == "log" and "gradient_error" in event.data:
            self._session._newest["gradient_error"] = event.data["gradient_error"]
        elif event.kind == "progress":
            self._session.progress = Progress(**event.data)
        elif event.kind == "evaluation":
            self._session._newest["eval_loss"] = event.data["eval_loss"]
        elif event.kind == "pruning":
            self._session._pruning = dict(event.data)
