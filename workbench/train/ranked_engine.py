"""The engine of one rank: the same loop, with what all ranks have to agree on.

Gradients are averaged by DistributedDataParallel, which the trainer's accelerator wraps around the model. What is left
is that the loss is a mean over the supervised tokens of *all* ranks (a rank with short samples must not weigh as much
as one with long ones), that a pause or stop reaches all of them at the same step, and that one of them writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import Subset

from .control import Control, StopRequested
from .engine import Engine
from .ranks import RANK_FOLDERS, STOP_FILE, Ranks, RankWatch, add_up
from .run_folder import CHECKPOINTS
from .telemetry import COUNTS, TokenCounts

# Between two looks of ranks that stand still together.
_PAUSE_LOOK_S = 0.2


class RankedEngine(Engine):
    """An Engine that runs beside others of its kind, one a device."""

    def __init__(self, parts: tuple[Any, ...], *, ranks: Ranks, main_dir: Path, watch: RankWatch) -> None:
        """Make an engine.

        Args:
            parts: The arguments of Engine: run, arguments, folder, control, publisher.
            ranks: Which of them this is.
            main_dir: The run folder of rank 0, where checkpoints are.
            watch: Told where this rank is.
        """
        self._ranks, self._main_dir, self._watch = ranks, main_dir, watch
        self._all_states: list[dict[str, Any]] = []
        run, arguments, folder, self._real_wishes, publisher = parts
        super().__init__(run, arguments, folder, _Obedient(), publisher)

    # -- the step --------------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Fetch this rank's micro-batches and count the supervised tokens of all ranks."""
        self._watch.mark(f"step {self.state.global_step + 1}: fetching data")
        self._stand_still_together()
        self._clock.begin_step()
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        own = sum((batch.pop(COUNTS) for batch in batches), TokenCounts())
        self._watch.mark(f"step {self.state.global_step + 1}: counting tokens")
        sums = self._add_up([own.real, own.padding, own.supervised])
        self._counts = TokenCounts(int(sums[0]), int(sums[1]), int(sums[2]), own.rows)
        self._step_loss = None
        # The wrapper averages gradients over the ranks: dividing each rank's sum by a mean rank's tokens makes that
        # average the mean over all tokens.
        return batches, max(1, self._counts.supervised) / self._ranks.size

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run one micro-step."""
        self._watch.mark(f"step {self.state.global_step + 1}: forward and backward")
        return super().training_step(model, inputs, num_items_in_batch)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        self._watch.mark(f"step {self.state.global_step + 1}: norm of the gradients")
        if self._step_loss is not None:
            own = float(self._step_loss)
            self._step_loss = torch.tensor(self._add_up([own])[0] / self._ranks.size, device=self._step_loss.device)
        return super()._get_grad_norm(model, grad_norm)

    def _rows_of_step(self) -> list[int]:
        """The training samples of all ranks: the loss is of all of them, so that all come here at the same step."""
        rows: list[list[int]] = [[] for _ in range(self._ranks.size)]
        distributed.all_gather_object(rows, super()._rows_of_step())
        return [row for own in rows for row in own]

    def _add_up(self, values: list[float]) -> list[float]:
        return add_up(values, self.args.device)

    def _stand_still_together(self) -> None:
        """Stop where any rank was asked to; stand still while the main one is asked to.

        Raises:
            StopRequested: At the same step on every rank.
        """
        wishes, is_paused = self._real_wishes, False
        while True:
            asked = wishes.stop_wanted or (self._ranks.is_main and (self._main_dir / RANK_FOLDERS / STOP_FILE).exists())
            stops, pauses = self._add_up([float(asked), float(self._ranks.is_main and wishes.pause_wanted)])
            if stops:
                raise StopRequested
            if bool(pauses) != is_paused:
                is_paused = bool(pauses)
                wishes.tell_paused(is_paused)
            if not pauses:
                return
            wishes.wait_for_change(_PAUSE_LOOK_S)
            self._watch.mark(f"step {self.state.global_step + 1}: paused")

    # -- evaluation ------------------------------------------------------------------------------------------------

    def _evaluation_rows(self) -> Any:
        """Every so-many-th row; sums over the ranks are those of all rows."""
        self._watch.mark(f"step {self.state.global_step}: evaluation")
        rows: Any = super()._evaluation_rows()
        return Subset(rows, range(self._ranks.rank, len(rows), self._ranks.size))

    def _over_ranks(self, total: Tensor, num_items: int, num_right: int | None) -> tuple[Tensor, int, int | None]:
        sums = self._add_up([float(total), num_items, num_right or 0, float(num_right is not None)])
        return torch.tensor(sums[0], dtype=total.dtype), int(sums[1]), int(sums[2]) if sums[3] else None

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> Path | None:
        """Write the state on rank 0, with the random states of all ranks; the others wait until it is there."""
        step = self.state.global_step
        if step == 0:
            return None
        self._watch.mark(f"step {step}: saving")
        self._all_states = [{} for _ in range(self._ranks.size)]
        distributed.all_gather_object(self._all_states, self._random_state)
        final = self._main_dir / CHECKPOINTS / f"step-{step:06d}"
        if self._ranks.is_main:
            super().save_checkpoint()
        elif self.state.best_global_step == step:
            self.state.best_model_checkpoint = str(final)
        distributed.barrier()
        return final

    def _save_random_state(self, folder: Path) -> None:
        super()._save_random_state(folder)  # What a run on one device goes on with.
        for rank, state in enumerate(self._all_states):
            torch.save(state, folder / f"rng_state_{rank}.pth")

    def close(self) -> None:
        """End watching, then close as every engine."""
        self._watch.mark("the end")
        with contextlib.suppress(RuntimeError):  # A rank that failed is not waited for.
            distributed.barrier()
        self._watch.close()
        super().close()


class _Obedient(Control):
    """Wishes are looked at between steps, by all ranks at once; in between nothing stops a single one."""

    def check(self) -> float:
        return 0.0
