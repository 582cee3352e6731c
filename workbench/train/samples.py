"""What the model answers before the run and at its checkpoints: the same prompts, so that a person sees it learn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..components.encoding import IGNORED
from ..components.generation import generate_text, render_prompt
from ..events import Event
from .build import Run
from .control import Control

# Of a row that is plain text: so many tokens are given, what follows is the answer.
GIVEN_TOKENS = 16


class SampleWriter:
    """Asks the model of a run and publishes its answers as ``samples`` events."""

    def __init__(self, run: Run, control: Control, publish: Callable[[Event], Any]) -> None:
        """Choose the prompts: those of the Recipe, else the beginnings of the first held-out rows."""
        self._run, self._publish = run, publish
        self._wish = _Wish(control)
        evaluation, tokenizer = run.recipe.evaluation, run.tokenizer
        self._prompts: list[tuple[str, str, str | Sequence[int]]] = []  # shown, wanted, what the model reads
        for text in evaluation.sample_prompts:
            self._prompts.append((text, "", render_prompt(tokenizer, [{"role": "user", "content": text}])))
        if evaluation.num_samples and run.data.evaluation is not None:
            for index in range(min(evaluation.num_samples, len(run.data.evaluation))):
                self._prompts.append(self._of_row(run.data.evaluation[index]))

    def write(self, step: int) -> float:
        """Ask everything once and publish the answers.

        Args:
            step: Optimizer steps done.

        Returns:
            Seconds that it took, which are none of a step.
        """
        if not self._prompts:
            return 0.0
        began_s = time.perf_counter()
        run, model = self._run, self._run.model
        device = next(model.parameters()).device.type
        answers = []
        was_training = model.training
        model.eval()
        try:
            for shown, wanted, given in self._prompts:
                if self._wish.is_set:
                    break
                with run.precision.autocast(device):
                    answer = generate_text(
                        model, run.tokenizer, given,
                        max_new_tokens=run.recipe.evaluation.sample_max_new_tokens, cancel=self._wish,
                    )  # fmt: skip
                answers.append({"prompt": shown, "wanted": wanted, "answer": answer})
        finally:
            model.train(was_training)
        if answers:
            self._publish(Event("samples", {"step": step, "samples": answers}))
        return time.perf_counter() - began_s

    def _of_row(self, row: Any) -> tuple[str, str, Sequence[int]]:
        ids, labels = list(row["input_ids"]), list(row["labels"])
        # The first token is never learned: nothing stands before it.
        learned = [place for place, label in enumerate(labels) if label != IGNORED]
        begin = learned[0] if learned and learned[0] > 1 else min(GIVEN_TOKENS, max(1, len(ids) // 2))
        end = next((place for place in range(begin, len(ids)) if learned and labels[place] == IGNORED), len(ids))

        def text(some: Sequence[int]) -> str:
            return str(self._run.tokenizer.decode(some, skip_special_tokens=True))

        return text(ids[:begin]), text(ids[begin:end]), ids[:begin]


class _Wish:
    """Looks like a Cancel: set once the run shall stop."""

    def __init__(self, control: Control) -> None:
        self._control = control

    @property
    def is_set(self) -> bool:
        return self._control.stop_wanted
