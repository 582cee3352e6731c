"""A run's model and the one it began with, side by side on one prompt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..components.generation import generate_text, render_prompt
from ..components.source import find_source, load_tokenizer
from ..components.task import CAUSAL, auto_class
from ..errors import RunError
from ..events import Cancel, Progress, ProgressCallback
from ..export.export import find_result
from ..export.loading import load_result
from ..recipe import Recipe
from ..train.process import live_session
from ..train.run_folder import read_recipe_of
from ..train.teardown import collect_memory

BASE, TUNED = "base", "tuned"
SIDES = (BASE, TUNED)


class Chat:
    """The base and the tuned model of a run in memory, until ``close``.

    With an adapter both are one model whose adapter is switched off for the base's answers.

    Example:
        >>> with Chat("runs/my-run") as chat:   # doctest: +SKIP
        ...     print(chat.ask("Hello", "base"), chat.ask("Hello", "tuned"))
    """

    def __init__(
        self, run_dir: str | Path, *, progress: ProgressCallback | None = None, cancel: Cancel | None = None
    ) -> None:
        """Load both.

        Args:
            run_dir: A run's folder.
            progress: Told about the stage ``"load"``.
            cancel: Looked at between the models.

        Raises:
            RunError: A run is live in this process, or the task writes no text.
            ExportError: The run has saved nothing.
            ModelError: The base cannot be found or read.
        """
        require_no_run()
        folder = Path(run_dir)
        recipe = read_recipe_of(folder)
        if recipe.model.task != CAUSAL:
            raise RunError(f"A model for {recipe.model.task} writes no answers. Choose a run of a language model.")
        result = find_result(folder)
        _tell(progress, cancel, 0, "Finding the base model")
        source = find_source(recipe, for_training=True, progress=progress, cancel=cancel)
        self.run_dir = folder
        self.tokenizer: Any = load_tokenizer(source)
        _tell(progress, cancel, 1, "Loading the tuned model")
        self._tuned: Any = _place(load_result(recipe, source, result))
        self._base: Any = None
        if not _can_switch_off(self._tuned, recipe):
            _tell(progress, cancel, 2, "Loading the base model")
            self._base = _place(_load_base(recipe, source))
        _tell(progress, cancel, 3, "Both are loaded")

    def ask(
        self,
        prompt: str,
        side: str = TUNED,
        *,
        max_new_tokens: int = 256,
        on_text: Callable[[str], Any] | None = None,
        cancel: Cancel | None = None,
    ) -> str:
        """Return what one of them answers.

        Args:
            prompt: What the user says; the chat template is put around it.
            side: ``"base"`` or ``"tuned"``.
            max_new_tokens: Tokens after which it stops anyway.
            on_text: Told the whole text so far after every token.
            cancel: Ends the answer at the next token; what is there is returned.

        Raises:
            RunError: A run is live in this process, or this is closed.
            ModelError: The prompt is too long.
        """
        require_no_run()
        if self._tuned is None:
            raise RunError("The models are released. Load them again.")
        if side not in SIDES:
            raise RunError(f"side={side!r} is none of {', '.join(SIDES)}.")
        text = render_prompt(self.tokenizer, [{"role": "user", "content": prompt}])
        switched = self._tuned.disable_adapter() if side == BASE and self._base is None else nullcontext()
        model = self._base if side == BASE and self._base is not None else self._tuned
        with switched:
            return generate_text(
                model, self.tokenizer, text, max_new_tokens=max_new_tokens, on_text=on_text, cancel=cancel
            )

    def close(self) -> None:
        """Give the memory of both back; may be called twice."""
        self._tuned = self._base = self.tokenizer = None
        collect_memory()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def require_no_run() -> None:
    """Refuse beside a run: both would want the device's memory.

    Raises:
        RunError: A run is live in this process.
    """
    session = live_session()
    if session is not None:
        raise RunError(
            f"A run is {session.state} in this kernel and needs its memory; the models are loaded when it has ended. "
            "Stop it first, or wait for it."
        )


def _can_switch_off(model: Any, recipe: Recipe) -> bool:
    """Whether the model without its adapter is the base: weights that were cut stay cut."""
    return hasattr(model, "disable_adapter") and recipe.pruning.method == "none" and not recipe.model.new_tokens


def _load_base(recipe: Recipe, source: Any) -> Any:
    from ..components.new_tokens import add_token_rows
    from ..components.quiet import no_progress_bars

    kind: Any = auto_class(recipe)
    with no_progress_bars():
        model = kind.from_pretrained(source.path, revision=source.revision, use_safetensors=True)
    add_token_rows(source, model)
    return model.eval()


def _place(model: Any) -> Any:
    import torch

    return model.to("cuda") if torch.cuda.is_available() else model


def _tell(progress: ProgressCallback | None, cancel: Cancel | None, done: int, message: str) -> None:
    if cancel is not None:
        cancel.check()
    if progress is not None:
        progress(Progress("load", done, 3, message))
