"""The loop: transformers' Trainer over the parts that ``components/`` built."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback

from ..components.freezing import PhaseSwitch
from ..components.loss import evaluate_batch
from ..errors import NonFiniteError
from ..events import Event
from .build import Run
from .checkpoint import random_state
from .compiling import CompiledForward
from .compression import measure_gradient_error
from .control import Control
from .pruner import Pruner
from .resumable import progress_data
from .run_folder import RunFolder
from .sampler import EpochSampler, sampler_of
from .samples import SampleWriter
from .spikes import SHOWN_ROWS, Spike, begin_of, spike_event
from .stepping import SteppingTrainer
from .telemetry import COUNTS, ROW, CountingCollator, Publisher, is_finite, price_per_hour_usd

# Steps in a row that ``policies.on_nonfinite: skip`` skips. A model whose weights are NaN never recovers.
MAX_SKIPPED_STEPS = 20


class Engine(SteppingTrainer):
    """transformers' loop with the workbench's micro-step, loss, evaluation, checkpoints and guard against NaN.

    The trainer keeps what it is good at: epochs, accumulation, the schedule, trackers, the order of callbacks.
    """

    def __init__(self, run: Run, arguments: Any, folder: RunFolder, control: Control, publisher: Publisher) -> None:
        """Make an engine.

        Args:
            run: What was built.
            arguments: From ``training_arguments``.
            folder: Where checkpoints go.
            control: Pause and stop.
            publisher: Observers and meters.
        """
        self.begin(run, folder, publisher)
        self._wishes = control
        self.begin_stepping(run)
        self._price_per_hour_usd = price_per_hour_usd(run.recipe, self.target)
        self._skipped_in_a_row = 0
        self.phases = PhaseSwitch(run.recipe, run.model)
        self.pruner = Pruner(run.recipe, run.model, publisher.publish, self.held_out_loss)
        self._samples = SampleWriter(run, control, publisher.publish)
        self._sampler = sampler_of(run.recipe, run.data.train, num_processes=arguments.world_size)
        self._compiled = (
            CompiledForward(run.recipe, run.model, publisher.publish) if run.recipe.training.torch_compile else None
        )
        super().__init__(
            model=run.model,
            args=arguments,
            data_collator=CountingCollator(run.collator),
            train_dataset=_numbered(run.data.train),
            eval_dataset=run.data.evaluation,
            optimizers=(run.optimizer, run.schedule),
            callbacks=[_Flow(self)],
        )
        self.remove_callback(PrinterCallback)
        if run.precision.uses_grad_scaler:
            # accelerate's optimizer wrapper takes it from here and skips steps that overflowed.
            self.accelerator.scaler = torch.amp.GradScaler("cuda" if run.device.has_caching_allocator else "cpu")

    # -- the step --------------------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Return the gradients' norm; clipping waits until it is known to be finite.

        Clipping by a NaN norm would make every gradient NaN and hide which one was the first.
        """
        if self._scaler is not None:
            self._scaler.unscale_(self._run.optimizer)
        return torch.nn.utils.get_total_norm(self._gradients())

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._run.model.parameters() if parameter.grad is not None]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        """Read loss and norm once, write the step's row, then clip, or block the update where one is not finite."""
        norm = self._clip_grad_norm(model) if grad_norm is None else grad_norm
        loss_tensor = self._step_loss if self._step_loss is not None else torch.zeros_like(norm)
        # One read for both: each read waits for the GPU.
        loss, norm_value = torch.stack((loss_tensor.float(), norm.float())).tolist()
        self._row = {
            "step": self.state.global_step + 1,
            "loss": loss if self._counts.supervised else None,
            "grad_norm": norm_value,
            "learning_rate": self._run.optimizer.param_groups[0]["lr"],
            "loss_scale": self._scaler.get_scale() if self._scaler is not None else None,
            "num_tokens": self._counts.real,
            "num_padding_tokens": self._counts.padding,
            "num_supervised_tokens": self._counts.supervised,
        }
        if is_finite(loss, norm_value):
            self._skipped_in_a_row = 0
            self._measure_noise(norm_value)
            spike = self._spikes.judge(loss, norm_value) if self._counts.supervised else None
            damping = 1.0 if spike is None else self._answer_spike(spike)
            if self.args.max_grad_norm > 0:
                trainable = [parameter for parameter in self._run.model.parameters() if parameter.grad is not None]
                torch.nn.utils.clip_grads_with_norm_(trainable, self.args.max_grad_norm, norm * damping)
        else:
            self._block_update(loss, norm_value)
        return norm

    def _answer_spike(self, spike: Spike) -> float:
        """Tell of a step that stands out, do as the policy says, and return what its gradients were scaled by."""
        policy, rows = self._run.recipe.policies.on_spike, self._rows_of_step()
        self._spikes.num_spikes += 1
        damping = 1.0
        if policy == "skip":
            self._spikes.num_skipped += 1
            self._drop_gradients()
        elif policy == "damp" and spike.damping < 1:
            damping = spike.damping
            torch._foreach_mul_(self._gradients(), damping)
        texts = [begin_of(self._run.data.train[row], self._run.tokenizer) for row in rows[:SHOWN_ROWS]]
        told = spike_event(spike, policy, self._row["step"], rows, texts)
        self._publisher.publish(Event("spike", {**told, "num_skipped": self._spikes.num_skipped}))
        return damping

    def _rows_of_step(self) -> list[int]:
        """The training samples of the step, by their number in the prepared data."""
        return list(self._counts.rows)

    def _drop_gradients(self) -> None:
        for parameter in self._run.model.parameters():
            parameter.grad = None  # Every optimizer leaves a parameter without a gradient alone.

    def _block_update(self, loss: float, norm: float) -> None:
        """Keep a NaN or Inf out of the weights; then go on or stop, as the policy says.

        Raises:
            NonFiniteError: The policy is to stop, or too many steps in a row were skipped.
        """
        scale = self._row["loss_scale"]
        if scale is not None and scale > 1 and math.isfinite(loss):
            # Normal in the first steps of float16: the scaler drops the update and halves its scale.
            self._log(f"Step {self._row['step']}: float16 gradients overflowed at a loss scale of {scale:g}; skipped.")
            return
        names = [
            name
            for name, parameter in self._run.model.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        self._drop_gradients()
        self._skipped_in_a_row += 1
        where = f" First bad gradient: {names[0]} ({len(names)} in all)." if names else ""
        text = f"Step {self._row['step']}: the loss is {loss:g} and the gradient norm {norm:g}; no weight was updated."
        if self._run.recipe.policies.on_nonfinite == "skip" and self._skipped_in_a_row < MAX_SKIPPED_STEPS:
            self._log(text + where)
            return
        self.finish_row()
        advice = "Lower training.learning_rate, or set policies.on_nonfinite=skip to leave such steps out."
        if self._skipped_in_a_row > 1:
            advice = f"{self._skipped_in_a_row} steps in a row were skipped. Go back to an earlier checkpoint."
        raise NonFiniteError(f"{text}{where} {advice}")

    def measure_compression(self) -> None:
        """Tell what storing activations in few bits does to a gradient, measured on a sample of the run."""
        found = measure_gradient_error(self._run, list(self._sampler))
        if found is not None:
            self._publisher.publish(Event("log", found))
            self._publisher.measure()  # Its peak belongs to no step.

    # -- after the step --------------------------------------------------------------------------------------------

    def drop_step(self) -> None:
        """Let go of the unfinished step: its gradients and its loss."""
        self._run.model.zero_grad(set_to_none=True)
        self._step_loss = None
        self._tr_loss = torch.zeros((), device=self.args.device)

    def finish_step(self) -> None:
        """Complete the row of the step just done: time, tokens per second, meters."""
        self._before_update = None
        self._spikes.record(self._row.get("loss"), self._row.get("grad_norm", math.nan))
        step_s = self._clock.end_step()
        if self._compiled is not None:
            self._compiled.end_step(self.state.global_step, step_s, self._counts.real + self._counts.padding)
        batch, price, elapsed_s = self._end_batch(), self._price_per_hour_usd, self._clock.elapsed_s
        self._row |= {
            **batch,
            "epoch": self.state.epoch,
            "step_s": step_s,
            "elapsed_s": elapsed_s,
            "tokens_per_s": self._counts.real / step_s if step_s > 0 else None,
            "utilization_fraction": self._utilization(step_s),
            "cost_usd": None if price is None else elapsed_s / 3600 * price,
            **self._publisher.measure(),
        }
        self._parts.end_step(self._row)
        self._folder.beat()

    def _utilization(self, step_s: float) -> float | None:
        """Return the share of the step in which this CPU's threads computed; a GPU's meter measures its own."""
        if self._run.device.has_caching_allocator:
            return None
        return self._clock.busy_fraction(step_s, torch.get_num_threads())

    def finish_row(self) -> None:
        """Publish the row of the step, once."""
        row, self._row = self._row, {}
        if row:
            self._publisher.publish(Event("step", {name: value for name, value in row.items() if value is not None}))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if not self.control.should_evaluate:
            self.finish_row()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        # A stop may come in the middle of the next step; a checkpoint then belongs to this border.
        self._random_state = random_state()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Hand logs to the trackers; only evaluations stay in the trainer's own history.

        That history is written into every checkpoint and would grow with every step; ``metrics.jsonl`` has them all.
        """
        kept = len(self.state.log_history)
        super().log(logs, start_time)
        if "eval_loss" not in logs:
            del self.state.log_history[kept:]

    # -- data ------------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        return self._sampler

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return the mean loss over the supervised tokens of the held-out rows, by the same loss as training.

        Of a classifier also the share of rows it gets right, ``eval_accuracy``.
        """
        # A checkpoint made while this fails is of the border before it, and says that the evaluation is still due.
        self._random_state, self._due_row = random_state(), dict(self._row)
        total, num_items, num_right = self._sum_held_out()
        eval_loss = float(total) / num_items if num_items else math.nan
        metrics = {"eval_loss": eval_loss}
        if num_right is not None and num_items:
            metrics["eval_accuracy"] = num_right / num_items
        if self._row:
            self._row |= metrics
        self.finish_row()
        self._due_row = None
        self.log(dict(metrics))
        self._publisher.publish(
            Event("evaluation", {"step": self.state.global_step, **metrics, "num_items": num_items})
        )
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def write_samples(self, step: int) -> None:
        """Let the model answer the Recipe's prompts; its seconds are none of a step."""
        self._clock.add_pause(self._samples.write(step))

    def held_out_loss(self) -> float | None:
        """Return the mean loss on the held-out rows without recording it; None where there are none."""
        if self.eval_dataset is None:
            return None
        total, num_items, _ = self._sum_held_out()
        return float(total) / num_items if num_items else None

    def _sum_held_out(self) -> tuple[Tensor, int, int | None]:
        """Return the summed loss over the held-out rows, their supervised tokens, and how many rows are right."""
        recipe, model = self._run.recipe, self._run.model
        size = recipe.evaluation.per_device_eval_batch_size
        loader = DataLoader(self._evaluation_rows(), batch_size=size, collate_fn=self.data_collator, shuffle=False)
        total, num_items = torch.zeros((), dtype=torch.float64), 0
        num_right: int | None = None
        model.eval()
        try:
            with torch.no_grad():
                for done, batch in enumerate(loader):
                    self._clock.add_pause(self._wishes.check())
                    self._publisher.publish(
                        Event("progress", progress_data("evaluate", done, len(loader), "Evaluating held-out rows"))
                    )
                    count = batch.pop(COUNTS).supervised
                    batch = self._prepare_inputs(batch)
                    with self._run.precision.autocast(batch["input_ids"].device.type):
                        # Over 1: the sum, so that batches of unequal length weigh by their tokens.
                        loss, right = evaluate_batch(recipe, model, batch)
                    total += loss.double().cpu() if count else 0.0
                    num_right = num_right if right is None else (num_right or 0) + int(right)
                    num_items += count
        except BaseException:
            self.finish_row()
            raise
        finally:
            model.train()
        return self._over_ranks(total, num_items, num_right)

    def _evaluation_rows(self) -> Any:
        """The held-out rows this process evaluates."""
        return self.eval_dataset

    def _over_ranks(self, total: Tensor, num_items: int, num_right: int | None) -> tuple[Tensor, int, int | None]:
        """Return the sums over all processes; of a single one, its own."""
        return total, num_items, num_right

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        evaluation, loss = self._run.recipe.evaluation, metrics["eval_loss"]
        is_best = math.isfinite(loss) and (self.state.best_metric is None or loss < self.state.best_metric)
        if is_best:
            self.state.best_metric, self.state.best_global_step = loss, self.state.global_step
            self._evaluations_without_gain = 0
            if evaluation.load_best_model_at_end:
                self.control.should_save = True
            return True
        self._evaluations_without_gain += 1
        patience = evaluation.early_stopping_patience
        if patience is not None and self._evaluations_without_gain >= patience:
            self._log(f"Stopped early: {patience} evaluations without a better loss than {self.state.best_metric:.4f}.")
            self.control.should_training_stop = self.control.should_save = True
        return False

    def close(self) -> None:
        """Close the trackers and let go of everything that keeps tensors alive."""
        if self._compiled is not None:
            self._compiled.close()
        self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.accelerator.free_memory()


def _numbered(samples: Any) -> Any:
    """Return the training set with each sample's number, which goes with it into its batch.

    The order alone would not tell: loader workers fetch ahead, and every rank takes other samples.
    """
    return samples.add_column(ROW, np.arange(len(samples)), new_fingerprint=f"{samples._fingerprint}-numbered")


class _Flow(TrainerCallback):
    """Decides after each step what happens next; the trainer's own strategies are off."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._engine.measure_compression()
        self._engine._random_state = random_state()
        self._engine.first_step = state.global_step
        self._engine.catch_up(self._engine._resumes_from)
        if state.global_step == 0:
            self._engine.write_samples(0)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._engine.write_samples(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine = self._engine
        if engine._compiled is not None:
            engine._compiled.begin_step(state.global_step)
        engine._clock.add_pause(engine.pruner.before_step(state.global_step))
        phase = engine.phases.apply(state.global_step, engine._run.optimizer)
        if phase is not None:
            number = len(engine._run.recipe.phases.steps)
            trainable = sum(one.numel() for one in engine._run.model.parameters() if one.requires_grad)
            engine._log(f"Phase {phase + 1} of {number} begins: {trainable:,} parameters train.")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._engine.begin_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        engine = self._engine
        engine.pruner.after_update()
        engine.finish_step()
        recipe, step = engine._run.recipe, state.global_step
        is_last = step >= state.max_steps
        every = recipe.evaluation.eval_steps
        if engine.eval_dataset is not None and (is_last or (every and step % every == 0)):
            control.should_evaluate = True
        if is_last or (recipe.training.save_steps and step % recipe.training.save_steps == 0):
            control.should_save = True
        return control
