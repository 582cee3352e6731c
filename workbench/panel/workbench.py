"""The panel: pick, estimate, train and watch, in one widget."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from ..components.source import find_source, model_names
from ..errors import RecipeError, RunError
from ..estimate.estimate import Estimate
from ..events import LIVE_STATES, Cancel, ProgressCallback
from ..hardware import device_names
from ..recipe import Recipe
from ..report.charts import render_memory_bar
from ..report.html import render_failure
from ..report.text import describe_estimate
from ..train.run_folder import DEFAULT_ROOT
from .background import Background, Outcome
from .before_view import BeforeView
from .comms import answer_beside_cells, pump_while_waiting
from .estimate_view import EstimateView
from .fields import build_fields, classed
from .pieces import style_sheet
from .preview_view import PreviewView
from .runs import live_session, open_run, read_facts, read_failure, require_no_live_session
from .settings_view import Header, connect_fields, main_card, suggest_data
from .stream import is_foreign_front, render_history
from .tabs import Tabs
from .texts import Say
from .train_view import TrainView
from .view_model import Change, PanelModel

STATIC_STYLE = (
    "<style>.wb-static{font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:13px}"
    ".wb-static .wb-charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(280px,1fr));gap:14px}"
    ".wb-static figure{margin:0}</style>"
)


class Workbench:
    """The workbench as a panel in a notebook. Make one and let the cell show it.

    A new panel attaches to the run that is live in this kernel, if there is one, and shows its whole history.

    Example:
        >>> panel = Workbench()
        >>> panel  # doctest: +SKIP
        >>> session = panel.start()
        >>> panel.wait()
    """

    def __init__(
        self,
        recipe: Recipe | None = None,
        *,
        run_root: str | Path | None = None,
        plots: str = "auto",
        language: str = "en",
    ) -> None:
        """Build the panel.

        Args:
            recipe: Settings to begin with; the default is a good LoRA run.
            run_root: Folder that new run folders go into; None takes the usual one.
            plots: ``"canvas"`` (streams to a script in the page), ``"svg"`` (drawn by the kernel, core widgets only) or
                ``"auto"`` (svg on Colab and in VS Code, where third-party widgets may not load).
            language: ``"en"`` or ``"zh"`` (simplified Chinese) for the panel's own words.

        Raises:
            LanguageError: There are no texts in this language.
        """
        pump_while_waiting()
        live = live_session()
        self._model = PanelModel(recipe or (live.recipe if live is not None else None), say=Say(language))
        self._run_root = None if run_root is None else Path(run_root)
        self._handles: list[Any] = []
        self._estimates = Background("workbench-estimate")
        self._data = Background("workbench-data")
        use_plotly = plots == "canvas" or (plots == "auto" and not is_foreign_front())
        suggestions = {
            "model.name_or_path": model_names(),
            "data.name_or_path": suggest_data(),
            "hardware.emulate": device_names(),
        }
        self._fields = build_fields(self._model, suggestions)
        self._header = Header(self._model)
        self._preview = PreviewView(self._model, self._data, use_plotly=use_plotly)
        self._source_note = classed(widgets.HTML(), "wb-source-note")
        self._estimate_view = EstimateView(
            self._model, self._estimates, self._fields, use_plotly=use_plotly, find_shape=self._preview.shape_for
        )
        self._before = BeforeView(self._model)
        self._train = TrainView(self._start_clicked, plots, self._continue_clicked, self._before.box, self._model.say)
        self._connect()
        self.widget = self._arrange()
        answer_beside_cells(self.widget)
        self._estimate_view.request()
        self._request_note()
        if live is not None:
            self._train.attach(live)

    # -- what cells use ----------------------------------------------------------------------------------------------

    @property
    def recipe(self) -> Recipe:
        """The settings as they stand (the last valid ones)."""
        return self._model.recipe

    @property
    def estimate(self) -> Estimate | None:
        """The newest estimate, or None while there is none."""
        return self._estimate_view.estimate

    @property
    def session(self) -> Any:
        """The run that is shown, or None."""
        return self._train.session

    def change(self, changes: dict[str, Any]) -> Workbench:
        """Change fields as a person would on the panel, e.g. ``{"training.max_steps": 20}``.

        Raises:
            RecipeError: The Recipe refuses a value; nothing is changed.
        """
        problems = self._model.set_fields(changes)
        if problems:
            raise RecipeError(problems)
        return self

    def wait_for_estimate(self, timeout_s: float = 120.0) -> Estimate:
        """Return the estimate of the settings as they stand, waiting for it.

        Raises:
            TimeoutError: It took longer than ``timeout_s``.
            RunError: There is no estimate for these settings; the panel says why.
        """
        deadline = time.monotonic() + timeout_s
        while self.estimate is None or self.estimate.recipe_digest != self.recipe.digest():
            if not self._estimates.is_busy:
                raise RunError("There is no estimate for these settings; the panel says why.")
            if time.monotonic() > deadline:
                raise TimeoutError(f"No estimate after {timeout_s:g} s. Wait longer, or look at the panel.")
            time.sleep(0.05)
        return self.estimate

    def start(self) -> Any:
        """Start a run with the settings as they stand; return its Session at once.

        Raises:
            RecipeError: The settings have problems; all are listed.
            RunError: A run is live in this kernel already.
        """
        require_no_live_session()
        if self._before.is_busy:
            raise RunError("The check or the dry step is still at work; it would draw from the run's random numbers. "
                           "Wait for it, or cancel it.")  # fmt: skip
        problems = self._model.problems()
        if problems:
            raise RecipeError(problems)
        self._tabs.make_room()
        from ..pipeline import start_session

        self._estimates.drop("effects")
        session = start_session(self._model.recipe, **self._place())
        self._train.attach(session)
        return session

    def continue_with(self, changes: Mapping[str, Any] | None = None) -> Any:
        """Go on with the run that failed or was stopped, in this kernel, and return the Session that goes on.

        The panel's settings change with it; nothing that was learned is lost, see ``WatchedSession.continue_with``.

        Args:
            changes: ``{field: value}``; None applies the first remedy that the doctors offer.

        Raises:
            RecipeError: The changes are refused, or would change the samples of an optimizer step.
            RunError: There is no run to go on with, or another one is live.
        """
        require_no_live_session()
        self._tabs.make_room()
        ended = self._require_session()
        if not hasattr(ended, "continue_with"):
            raise RunError("This run ended in another kernel. Continue it with start_session(recipe, resume_from=...).")
        self._estimates.drop("effects")
        session = ended.continue_with(changes)
        self._model.set_fields({path: new for path, (_, new) in self._model.recipe.diff(session.recipe).items()})
        self._train.attach(session)
        return session

    def check(self) -> list[Any]:
        """Return what the pre-flight audit finds in the settings as they stand."""
        from ..pipeline import check

        require_no_live_session()
        return check(self._model.recipe)

    def try_worst_batch(self) -> Any:
        """Do two steps with the longest batch, an evaluation and a save, and return what they took."""
        from ..pipeline import try_worst_batch

        return try_worst_batch(self._model.recipe)

    def pause(self) -> None:
        """Pause the run at the next micro-step."""
        self._require_session().pause()

    def resume(self) -> None:
        """Go on with a paused run."""
        self._require_session().resume()

    def stop(self, *, save: bool = True) -> None:
        """Stop the run at the next micro-step, and save what was learned."""
        self._require_session().stop(save=save)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait until the run has ended; buttons keep working meanwhile. Returns the Session.

        The kernel's stop button ends the run at its next micro-step and saves it.

        Raises:
            RunError: The run failed; the cause is inside.
            KeyboardInterrupt: It was interrupted; the run has stopped and is saved.
        """
        session = self._require_session()
        try:
            return session.wait(timeout_s)
        finally:
            if session.state not in LIVE_STATES:
                self._train.finish()

    def report(self) -> Any:
        """Return the run (or the estimate) as a static picture that stays in the saved notebook."""
        from IPython.display import HTML

        return HTML(self._static_html())

    def attach(self, session: Any) -> Workbench:
        """Show a session that was started elsewhere in this kernel."""
        self._train.attach(session)
        return self

    @classmethod
    def open(cls, run_dir: str | Path, *, plots: str = "auto", language: str = "en") -> Workbench:
        """Return a panel on a run folder: its settings, its whole history, its result.

        Raises:
            RunFolderError: No run folder, or one that cannot be read.
        """
        ended = open_run(run_dir)
        panel = cls(ended.recipe, run_root=Path(run_dir).parent, plots=plots, language=language)
        panel._train.attach(ended)
        return panel

    def close(self) -> None:
        """Take the panel away; a live run goes on."""
        self._estimates.close()
        self._data.close()
        self._before.close()
        self._tabs.close()
        self._train.close()
        self.widget.close()

    # -- how it shows itself -------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return self._text()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {
            "text/plain": self._text(),
            "text/html": self._static_html(),
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self.widget.model_id,
            },
        }

    def _ipython_display_(self, **_: Any) -> None:
        from IPython.display import HTML, display

        display(self._repr_mimebundle_(), raw=True)
        # The result is published beside the widget: it stays when the notebook is saved and the kernel is gone.
        ended = self.session is not None and self.session.state not in LIVE_STATES
        self._handles.append(display(HTML(self._static_html() if ended else ""), display_id=True))

    def _text(self) -> str:
        if self.session is not None:
            return read_facts(self.session).text
        return (
            f"Fine-tuning panel: {describe_estimate(self.estimate)}"
            if self.estimate
            else "Fine-tuning panel: no run yet"
        )

    def _static_html(self) -> str:
        parts = [STATIC_STYLE, f"<p><b>{escape(self._text())}</b></p>"]
        if self.session is not None:
            history = getattr(self.session, "history", None)
            parts.append(render_history(history, self._train.levels))
            failure = read_failure(self.session)
            if failure is not None:
                parts.append(render_failure(*failure, "The run failed"))
        elif self.estimate is not None:
            memory = self.estimate.memory
            parts.append(render_memory_bar(memory.breakdown, memory.capacity_bytes, memory.interval_bytes))
        return f'<div class="wb-static">{"".join(parts)}</div>'

    # -- inside --------------------------------------------------------------------------------------------------------

    def _arrange(self) -> Any:
        left = widgets.VBox(
            (
                main_card(1, self._fields, (self._source_note, self._preview.box), self._model.say),
                main_card(2, self._fields, (), self._model.say),
            )
        )
        right = widgets.VBox((self._estimate_view.box,))
        columns = widgets.Box((classed(left, "wb-column"), classed(right, "wb-column", "wb-column-estimate")))
        first = classed(widgets.VBox((classed(columns, "wb-columns"), self._train.box)), "wb-page")
        self._tabs = Tabs(
            self._model,
            first,
            self._run_root or DEFAULT_ROOT,
            show_run=self._train.attach,
            find_shape=self._preview.shape_for,
        )
        self._tabs.runs.renamed_listeners.append(self._renamed)
        return classed(widgets.VBox((style_sheet(), self._header.box, self._tabs.widget)), "wb-panel")

    def _connect(self) -> None:
        refresh = connect_fields(self._model, self._fields, self._header)
        refresh(Change(frozenset(), "start"))
        self._estimate_view.listeners.append(self._train.set_estimate)
        self._train.anchor_listeners.append(self._estimate_view.anchor)
        self._estimate_view.wants_effects = lambda: live_session() is None
        self._preview.listeners.append(self._estimate_view.request)
        self._train.ended_listeners.append(self._ended)
        self._train.ended_listeners.append(lambda session: self._tabs.refresh())
        self._model.listen(self._changed)

    def _renamed(self, old: Path, new: Path) -> None:
        if self.session is not None and Path(self.session.run_dir).resolve() == old.resolve():
            self._train.attach(open_run(new))

    def _changed(self, change: Change) -> None:
        if "model.name_or_path" in change.fields and change.reason != "refused":
            self._request_note()

    def _request_note(self) -> None:
        """Say where the model comes from, its licence, and whether it can be trained."""
        recipe = self._model.recipe

        def work(progress: ProgressCallback, cancel: Cancel) -> Any:
            return find_source(recipe, for_training=False, progress=progress, cancel=cancel)

        def done(outcome: Outcome) -> None:
            source = outcome.value
            text = "" if source is None else source.note
            if source is not None and source.kind in ("catalogue", "inline"):
                text = f"Known by its config: enough to estimate. {text}"
            self._source_note.value = f'<div class="wb-source">{escape(text)}</div>' if text else ""

        self._estimates.submit("note", work, done)

    def _start_clicked(self) -> None:
        self._train.error.clear()
        try:
            self.start()
        except Exception as error:
            self._train.error.show(error, self._model.say("The run was not started"))

    def _continue_clicked(self, changes: Mapping[str, Any]) -> None:
        self._train.error.clear()
        try:
            self.continue_with(changes)
        except Exception as error:
            self._train.error.show(error, self._model.say("The run was not continued"))

    def _ended(self, session: Any) -> None:
        from IPython.display import HTML

        for handle in self._handles:
            handle.update(HTML(self._static_html()))

    def _place(self) -> dict[str, Any]:
        if self._run_root is None:
            return {}
        from ..train.run_folder import new_path

        return {"run_dir": new_path(self._model.recipe, self._run_root)}

    def _require_session(self) -> Any:
        if self.session is None:
            raise RunError("No run was started on this panel. Press Start, or call panel.start().")
        return self.session
