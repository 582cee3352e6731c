"""The part of the engine that leaves a run's state on disk and goes on from it, exactly."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import Trainer

from ..events import Event, Progress
from .build import Run
from .checkpoint import load_weights, random_state, save_weights, set_random_state
from .pruner import Pruner
from .rescue import Fingerprint, fingerprint
from .run_folder import CHECKPOINTS, RunFolder
from .spikes import SpikeDetector
from .telemetry import Publisher, StepClock

RUN_STATE = "run_state.json"

# Optimizers that read each other's state.
_STATE_FAMILIES = {"adamw_torch_fused": "adamw_torch", "paged_adamw_8bit": "adamw_bnb_8bit"}


class _NothingLeft(Exception):  # noqa: N818  # Not an error: the way out of the trainer's loop before its first step.
    """No step is left after the checkpoint."""


class ResumableTrainer(Trainer):
    """transformers' trainer with checkpoints of the workbench's own."""

    control: Any
    pruner: Pruner

    def begin(self, run: Run, folder: RunFolder, publisher: Publisher) -> None:
        """Take what the run is made of; before the trainer's own ``__init__``, which calls methods that need it.

        Args:
            run: What was built.
            folder: Where checkpoints go.
            publisher: Observers and meters.
        """
        self._run, self._folder, self._publisher = run, folder, publisher
        self._clock = StepClock()
        self._row: dict[str, Any] = {}
        self._evaluations_without_gain = 0
        self._spikes = SpikeDetector(run.recipe.policies.spike_factor)
        self._random_state: dict[str, Any] = {}
        self._before_update: Fingerprint | None = None
        self._resumes_from: str | None = None
        self.first_step = 0  # Steps that were done before this part of the run.
        self._caught_up: dict[str, Any] | None = None
        self._due_row: dict[str, Any] | None = None  # The step after which an evaluation is still to be made.

    def _log(self, message: str) -> None:
        self._publisher.publish(Event("log", {"message": message}))

    def begin_update(self) -> None:
        """Note what the optimizer is about to change."""
        self._before_update = fingerprint(self._run.optimizer)

    @property
    def update_is_whole(self) -> bool:
        """Whether weights and optimizer state are those after ``state.global_step`` steps, none half updated."""
        before = self._before_update
        return before is None or before == fingerprint(self._run.optimizer)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._random_state = random_state()
        self.save_checkpoint()

    def save_checkpoint(self) -> Path | None:
        """Write the state after the last finished step; return its folder, or None before the first step.

        Raises:
            RunFolderError: The folder cannot be written; earlier checkpoints are unharmed.
        """
        step = self.state.global_step
        if step == 0:
            return None
        name = f"{CHECKPOINTS}/step-{step:06d}"
        final = self._folder.path / name
        if self.state.best_global_step == step:
            self.state.best_model_checkpoint = str(final)
        if final.is_dir():
            return final
        self._publisher.publish(Event("progress", progress_data("save", 0, 1, f"Saving step {step}")))
        with self._folder.write_directory(name) as temporary:
            save_weights(self._run.model, temporary, for_resume=True)
            self.pruner.save(temporary)
            self._save_optimizer_and_scheduler(str(temporary))
            self._save_scaler(str(temporary))
            self._save_random_state(temporary)
            self.state.save_to_json(str(temporary / "trainer_state.json"))
            state = {
                "elapsed_s": self._clock.elapsed_s,
                "evaluations_without_gain": self._evaluations_without_gain,
                "optim": self._run.recipe.training.optim,
                "due_row": self._due_row,
                "spikes": self._spikes.state(),
                **self._batch_state(),
            }
            (temporary / RUN_STATE).write_text(json.dumps(state), encoding="utf-8")
        self._folder.remove_old_checkpoints(self._run.recipe.training.save_total_limit, protect=self.best_checkpoint)
        self._publisher.publish(Event("checkpoint", {"step": step, "path": str(final)}))
        return final

    def _save_random_state(self, folder: Path) -> None:
        torch.save(self._random_state, folder / "rng_state.pth")

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint of the best evaluation, where there is one."""
        best = self.state.best_model_checkpoint
        if not best:
            return None
        # A run that was fetched from a store has it in a folder of another name, perhaps of another system.
        here = self._folder.path / CHECKPOINTS / best.replace("\\", "/").rsplit("/", 1)[-1]
        return next((path for path in (Path(best), here) if path.is_dir()), None)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoint = Path(resume_from_checkpoint)
        # Read into host memory and copied into weights that are there: no meter of an emulated card may count it.
        with _disable_current_modes():
            load_weights(self._run.model, checkpoint)
        self.pruner.restore(checkpoint)
        if (checkpoint / RUN_STATE).is_file():
            state = json.loads((checkpoint / RUN_STATE).read_text(encoding="utf-8"))
            self._clock = StepClock(float(state["elapsed_s"]))
            self._evaluations_without_gain = int(state["evaluations_without_gain"])
            self._due_row = state.get("due_row")
            self._spikes.restore(state.get("spikes"))
            self._parts.restore(state.get("parts"))

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        # It warns of another micro-batch than the checkpoint's. The effective batch is what the position depends on,
        # and that is the same.
        logger = logging.getLogger("transformers.trainer_utils")
        was_disabled, logger.disabled = logger.disabled, True
        try:
            place: tuple[int, int] = super()._init_training_state(*args, **kwargs)
            return place
        finally:
            logger.disabled = was_disabled

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        path = Path(checkpoint)
        state = json.loads((path / RUN_STATE).read_text(encoding="utf-8")) if (path / RUN_STATE).is_file() else {}
        now = self._run.recipe.training.optim
        before = state.get("optim", now)
        if _STATE_FAMILIES.get(before, before) == _STATE_FAMILIES.get(now, now):
            with _disable_current_modes():
                super()._load_optimizer_and_scheduler(checkpoint)
            state = self._run.optimizer.state.values()
            self._publisher.adopt(value for one in state for value in one.values() if isinstance(value, torch.Tensor))
            return
        # The state of one optimizer means nothing to another one; the schedule goes on.
        self._log(f"The optimizer changed from {before} to {now}: its state begins anew, weights and schedule go on.")
        self.lr_scheduler.load_state_dict(torch.load(path / "scheduler.pt", weights_only=True))
        for group, rate in zip(self._run.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def catch_up(self, checkpoint: str | None) -> None:
        """Do what was still due when the checkpoint was made: the evaluation that failed, or nothing at all.

        Raises:
            _NothingLeft: The checkpoint is of the run's last step, or the evaluation says to stop early.
        """
        if checkpoint is not None and self._due_row is not None:
            self._row = self._due_row
            self._load_rng_state(checkpoint)
            self.control.should_evaluate = True
            metrics = self._evaluate(None, None)
            self.control.should_evaluate = False
            self._determine_best_metric(metrics, None)
            if self.control.should_save:
                self.save_checkpoint()  # It is there; now it is known to be the best one.
                self.control.should_save = False
            self._caught_up = self._random_state = random_state()
        is_last = self.state.global_step >= self.state.max_steps or self.control.should_training_stop
        if checkpoint is not None and is_last:
            raise _NothingLeft

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._caught_up is None:
            super()._load_rng_state(checkpoint)
        else:
            set_random_state(self._caught_up)

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        """Run the loop, from the checkpoint on where one is given."""
        self._resumes_from = resume_from_checkpoint
        try:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        except _NothingLeft:
            return None

    def use_best_weights(self) -> None:
        """Put the weights of the best evaluation into the model, where the Recipe asks for it."""
        if self._run.recipe.evaluation.load_best_model_at_end and self.best_checkpoint is not None:
            load_weights(self._run.model, self.best_checkpoint)


def progress_data(stage: str, done: int, total: int, message: str) -> dict[str, Any]:
    """Return the data of a progress event."""
    progress = Progress(stage, done, total, message)
    return {"stage": progress.stage, "done": progress.done, "total": progress.total, "message": progress.message}
