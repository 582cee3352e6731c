"""The tab of chat: the base and the tuned model answer one prompt, loaded when asked for and released again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from ..errors import RunError
from ..events import Cancel, Progress, ProgressCallback
from ..pipeline.run_rows import RunRow
from .background import Background, Outcome
from .fields import classed, with_tooltip
from .pieces import ErrorBox, ProgressLine, button, card, field_box
from .texts import Say

LOAD, ASK = "load", "ask"
# A page that is told of every token of a fast model has nothing else to do.
TELL_EVERY_S = 0.1
MAX_NEW_TOKENS = 256


def render_answer(title: str, text: str, state: str) -> str:
    """Return one side of the chat; what a model wrote is text and nothing else."""
    return (
        f'<div class="wb-side"><div class="wb-side-head"><b>{escape(title)}</b> <span>{escape(state)}</span></div>'
        f'<pre class="wb-answer" tabindex="0" aria-label="{escape(title)}">{escape(text)}</pre></div>'
    )


class ChatView:
    """Two answers under one prompt."""

    def __init__(self, say: Say, *, rows: Callable[[], Sequence[RunRow]]) -> None:
        """Make the view; nothing is loaded.

        Args:
            say: The panel's words.
            rows: The runs, those that are chosen first.
        """
        self.chat: Any = None
        self.answers: dict[str, str] = {}
        self._say, self._find_rows = say, rows
        self._background = Background("workbench-chat")
        self._working = ""
        self._run = with_tooltip(
            widgets.Dropdown, say("The run whose models answer"), options=[("–", "")], description=say("Run")
        )
        self._run.observe(self._picked, names="value")
        self._load_button = button(say("Load both models"), self.load, "wb-primary", "wb-chat-load")
        self._release_button = button(say("Release"), self.release, "wb-chat-release",
                                      tooltip=say("Give the memory of both models back"))  # fmt: skip
        self._prompt = with_tooltip(
            widgets.Textarea, say("What both models are asked"), description=say("Prompt"), rows=3,
            placeholder=say("Ask something"),
        )  # fmt: skip
        self._ask_button = button(say("Ask both"), self.ask, "wb-primary", "wb-chat-ask")
        self._stop_button = button(say("Stop"), self.stop, "wb-chat-stop", tooltip=say("End the answers here"))
        self._line = ProgressLine(self.stop, say)
        self._error = ErrorBox()
        self._note = widgets.HTML()
        self._sides = {side: widgets.HTML() for side in ("base", "tuned")}
        sides = classed(widgets.Box(tuple(self._sides.values())), "wb-sides")
        top = classed(
            widgets.HBox((field_box(self._run), self._load_button, self._release_button)),
            "wb-bar-row", "wb-chat-top",
        )  # fmt: skip
        buttons = classed(widgets.HBox((self._ask_button, self._stop_button)), "wb-bar-row")
        self.box = card(
            0, say("Chat"), say("The same prompt to the model before and after training; the likeliest words."),
            (top, self._line.box, self._note, classed(self._prompt, "wb-prompt"), buttons, self._error.box, sides),
            "wb-card-chat",
        )  # fmt: skip
        self._show()

    @property
    def is_loading(self) -> bool:
        """Whether models are being loaded, which draws random numbers."""
        return self._working == LOAD

    def request(self) -> None:
        """List the runs that are there now."""
        options = [(row.summary.name, str(row.summary.path)) for row in self._find_rows()] or [("–", "")]
        before = self._run.value
        if tuple(options) != tuple(self._run.options):
            self._run.options = options
            if before in [value for _, value in options]:
                self._run.value = before
        self._show()

    def load(self) -> None:
        """Load the models of the chosen run."""
        run_dir = self._run.value
        self._error.clear()
        if not run_dir:
            self._error.say(self._say("Choose a run first."))
            return
        try:
            from ..pipeline.chat import require_no_run

            require_no_run()
        except RunError as error:
            self._error.say(str(error))
            return
        self._let_go()

        def work(progress: ProgressCallback, cancel: Cancel) -> Any:
            from ..pipeline.chat import Chat

            return Chat(run_dir, progress=progress, cancel=cancel)

        self._begin(LOAD, self._say("Loading"))
        self._background.submit(LOAD, work, self._loaded, on_progress=self._line.show)

    def ask(self) -> None:
        """Ask the base, then the tuned model."""
        prompt, chat = self._prompt.value.strip(), self.chat
        self._error.clear()
        if not prompt or chat is None:
            self._error.say(self._say("Load the models and write a prompt first."))
            return
        self.answers = {}
        for side in self._sides:
            self._show_side(side, "")

        def work(progress: ProgressCallback, cancel: Cancel) -> Any:
            for side in self._sides:
                teller = _Teller(lambda text, side=side: self._show_side(side, text, self._say("writing…")))
                text = chat.ask(prompt, side, max_new_tokens=MAX_NEW_TOKENS, on_text=teller, cancel=cancel)
                self.answers[side] = text
                self._show_side(side, text, self._say("stopped") if cancel.is_set else "")
                if cancel.is_set:
                    break
            return None

        self._begin(ASK, "")
        self._background.submit(ASK, work, self._asked)

    def stop(self) -> None:
        """End what is at work: what was written so far stays."""
        if self._working:
            self._background.cancel(self._working)

    def release(self) -> None:
        """Stop, and give the memory of both models back."""
        self.stop()
        self._let_go()
        self._show()

    def wait(self, timeout_s: float = 120.0) -> None:
        """Wait until nothing is at work.

        Raises:
            TimeoutError: It took longer than ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while self._working:
            if time.monotonic() > deadline:
                raise TimeoutError(f"The chat was at work for more than {timeout_s:g} s. Stop it, or wait longer.")
            time.sleep(0.02)

    def close(self) -> None:
        """Release everything."""
        self._background.close()
        self._let_go()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        chat, self.chat = self.chat, None
        if chat is not None:
            chat.close()

    def _picked(self, change: Any) -> None:
        if self.chat is not None and str(self.chat.run_dir) != change["new"]:
            self.release()
        self._show()

    def _begin(self, name: str, words: str) -> None:
        self._working = name
        if words:
            self._line.show(Progress(name, message=words))
        self._show()

    def _loaded(self, outcome: Outcome) -> None:
        self._working = ""
        self._line.hide()
        if outcome.error is not None:
            self._error.show(outcome.error, self._say("The models were not loaded"))
        elif outcome.value is not None:
            self.chat = outcome.value
        self._show()

    def _asked(self, outcome: Outcome) -> None:
        self._working = ""
        if outcome.error is not None:
            self._error.show(outcome.error, self._say("No answer"))
        self._show()

    def _show_side(self, side: str, text: str, state: str = "") -> None:
        title = self._say("Before training") if side == "base" else self._say("After training")
        self._sides[side].value = render_answer(title, text, state)

    def _show(self) -> None:
        say, is_loaded = self._say, self.chat is not None
        self._load_button.disabled = bool(self._working) or not self._run.value or is_loaded
        self._release_button.disabled = not is_loaded
        self._ask_button.disabled = bool(self._working) or not is_loaded
        self._stop_button.disabled = self._working != ASK
        words = say("Both models are in memory.") if is_loaded else say("No model is in memory.")
        value = f'<div class="wb-hint" role="status">{escape(words)}</div>'
        if self._note.value != value:
            self._note.value = value


class _Teller:
    """Hands on the text at most every tenth of a second; the last one comes with the end of the answer."""

    def __init__(self, show: Callable[[str], Any]) -> None:
        self._show = show
        self._next_s = 0.0

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + TELL_EVERY_S
            self._show(text)
