"""``workbench launch``: the same run on several processes, by an engine that exists."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from .arguments import add_recipe_arguments, read_recipe

_LOOK_S = 1.0
_ENGINES = ("torchrun", "accelerate", "deepspeed", "ray")


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("launch", help="run on several devices", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("--engine", choices=_ENGINES, default="torchrun", help="what starts the processes")
    parser.add_argument("--num-processes", type=int, metavar="N", help="processes in all, one a device")
    parser.add_argument("--num-machines", type=int, metavar="M", help="machines that share them")
    parser.add_argument("--machine-rank", type=int, default=0, metavar="I", help="which machine this is; 0: main")
    parser.add_argument("--out", metavar="DIR", help="run folder; default: a new folder below ./runs")
    parser.add_argument("--resume", metavar="DIR", help="continue the run of this folder, also with another N")
    parser.add_argument("--write-only", action="store_true", help="write the engine's files and start nothing")
    parser.add_argument("--detach", action="store_true", help="return at once; the run goes on")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the engine's files, start it, and show how the run goes until it ends."""
    from ..scale.launch import launch_run, prepare_launch

    recipe = None if options.resume else read_recipe(options)
    if recipe is not None and options.num_machines:
        changes = {"sharding.num_machines": options.num_machines}
        if options.num_processes:
            changes["sharding.num_processes"] = options.num_processes
        recipe = recipe.with_changes(changes)
    settings = {
        "run_dir": options.out,
        "resume_from": options.resume,
        "num_processes": options.num_processes,
        "machine_rank": options.machine_rank,
    }
    if options.write_only:
        folder, plan = prepare_launch(recipe, options.engine, **settings)
        found = {"run_dir": str(folder), "files": sorted(plan.files), "command": list(plan.command)}
        print(json.dumps(found) if options.json else _written(found))
        return 0
    launched = launch_run(recipe, options.engine, **settings)
    print(f"{options.engine} runs as process {launched.process.pid}; run folder: {launched.run_dir}", file=sys.stderr)
    if not options.detach:
        _follow(launched)
    summary = launched.summary()
    if options.json:
        values = {name: getattr(summary, name) for name in ("name", "state", "num_steps_done", "loss", "eval_loss")}
        print(json.dumps({**values, "run_dir": str(launched.run_dir), "pid": launched.process.pid}))
    else:
        print(f"{summary.state} after {summary.num_steps_done} steps. Run folder: {launched.run_dir}")
    return 0


def _follow(launched: Any) -> None:
    """Wait for the end; the first Ctrl-C stops all ranks at the same step and saves."""
    shown = 0
    try:
        while launched.is_live:
            time.sleep(_LOOK_S)
            summary = launched.summary()
            if summary.num_steps_done > shown:
                shown = summary.num_steps_done
                loss = "" if summary.loss is None else f"  loss {summary.loss:.4f}"
                print(f"step {shown}{loss}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("Stopping all ranks at the end of this step and saving.", file=sys.stderr)
        launched.stop()
    launched.wait()


def _written(found: dict[str, Any]) -> str:
    command = " ".join(found["command"])
    return f"Wrote {', '.join(found['files'])} into {found['run_dir']}/launch.\nStart with: {command}"
