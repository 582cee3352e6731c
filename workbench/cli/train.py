"""``workbench train``: the same run as the panel's, in this terminal. Ctrl-C saves and stops."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import RunError
from ..events import Event, Progress
from ..recipe.locations import is_url
from ..units import format_bytes, format_seconds
from .arguments import ProgressLine, add_recipe_arguments, read_recipe

if TYPE_CHECKING:
    from ..train.session import Session


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("train", help="train, or resume a run", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("--out", metavar="DIR", help="run folder; default: a new folder below ./runs")
    parser.add_argument(
        "--resume",
        metavar="DIR|URL",
        help="continue the run of this folder from its last checkpoint, or of this URL (what training.upload_to was) "
        "from its newest whole checkpoint; flags and --set change its settings",
    )
    parser.add_argument(
        "--continue",
        dest="goes_on",
        action="store_true",
        help="go on with the run in --out where it has a checkpoint, else begin it there: for engines that restart",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=run)


class _Printer:
    """An Observer that prints one line per logged step, evaluation and checkpoint to stderr."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._line = ProgressLine(options)
        self._every = 1

    def on_event(self, event: Event) -> None:
        """Take one event."""
        data = event.data
        if event.kind == "progress":
            self._line(Progress(data["stage"], data.get("done", 0), data.get("total"), data.get("message", "")))
            return
        text = _line_of(event)
        if text:
            self._line.clear()
            print(text, file=sys.stderr, flush=True)


def _line_of(event: Event) -> str:
    data = event.data
    if event.kind == "step":
        memory = data.get("peak_allocated_bytes", data.get("allocated_bytes"))
        parts = [f"step {int(data['step'])}", f"loss {data.get('loss', float('nan')):.4f}"]
        if data.get("grad_norm") is not None:
            parts.append(f"grad_norm {data['grad_norm']:.3f}")
        if data.get("tokens_per_s"):
            parts.append(f"{data['tokens_per_s']:.0f} tokens/s")
        if memory:
            parts.append(format_bytes(memory))
        if data.get("step_s"):
            parts.append(format_seconds(data["step_s"]))
        return "  ".join(parts)
    if event.kind == "evaluation":
        accuracy = f"  eval_accuracy {data['eval_accuracy']:.3f}" if "eval_accuracy" in data else ""
        return f"evaluation  eval_loss {data.get('eval_loss', float('nan')):.4f}{accuracy}"
    if event.kind == "checkpoint":
        return f"saved {data.get('path', '')}"
    if event.kind == "finding":
        return f"! {data.get('summary', '')}"
    if event.kind in ("log", "spike"):
        return str(data.get("message", ""))
    return ""


def run(options: argparse.Namespace) -> int:
    """Train until the end, or until Ctrl-C or SIGTERM asks to stop; then everything is saved."""
    from ..train.run_folder import METRICS, list_checkpoints, read_recipe_of

    begins_again = False
    if options.goes_on and options.out and not options.resume:
        options.resume = options.out if list_checkpoints(options.out) else None
        begins_again = options.resume is None and (Path(options.out) / METRICS).exists()
    if is_url(options.resume):
        from ..train.download import fetch_run

        options.resume = str(fetch_run(options.resume, options.out, progress=ProgressLine(options)))
        options.out = None
    base = read_recipe_of(Path(options.resume)) if options.resume else None
    recipe = read_recipe(options, base)
    from ..pipeline import start_session
    from ..pipeline.run import require_same_samples

    if base is not None:
        require_same_samples(base, recipe)
    from ..train.ranks import read_ranks

    speaks = read_ranks().is_main  # Of several processes one prints.
    session = start_session(
        recipe,
        run_dir=options.out,
        resume_from=options.resume,
        observers=[_Printer(options)] if speaks and not options.json else [],
        begins_again=begins_again,
    )
    previous = _stop_on_signals(session)
    try:
        session.wait()
    except RunError as error:
        if session.ranks.size > 1:
            _leave_at_once(f"rank {session.ranks.rank}: {error}")
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if speaks:
        print(json.dumps(session.summary()) if options.json else _summary_text(session))
    # To a launcher a code other than 0 is a failure, after which it ends or restarts the others.
    return 130 if session.state == "stopped" and session.ranks.size == 1 else 0


def _leave_at_once(message: str) -> NoReturn:
    """End this process although its training thread may wait for another rank inside a collective."""
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def _stop_on_signals(session: Session) -> dict[int, Any]:
    """Make the first Ctrl-C or SIGTERM stop at a step border and save; the second one interrupts."""

    def stop(number: int, frame: FrameType | None) -> None:
        print("Stopping at the end of this step and saving; once more to give up.", file=sys.stderr)
        session.stop(save=True)
        signal.signal(number, signal.default_int_handler)

    return {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}


def _summary_text(session: Session) -> str:
    from ..report.text import economy_lines

    summary = session.summary()
    loss = summary.get("eval_loss") or summary.get("loss")
    lines = [f"{session.state} after {summary['num_steps_done']} steps"]
    if loss is not None:
        lines[0] += f", loss {loss:.4f}"
    lines.append(f"run folder: {summary['run_dir']}")
    if summary.get("result_dir"):
        lines.append(f"trained weights: {summary['result_dir']}")
    lines += economy_lines(summary.get("economy") or {}, summary.get("gradient_error"))
    lines += summary.get("verdicts", [])
    return "\n".join(lines)
