"""``workbench runs``: the runs below a folder."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("runs", help="list runs", description=__doc__)
    parser.add_argument("root", nargs="?", default="runs", help="folder with the run folders; default: ./runs")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one line a run, newest first."""
    import dataclasses

    from ..report.tables import render_runs
    from ..train.run_folder import list_runs

    found = list_runs(options.root)
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in found], default=str))
    else:
        print(
            render_runs(found) if found else f"No runs below {options.root}. Start one: workbench train --preset quick"
        )
    return 0
