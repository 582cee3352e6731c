"""``workbench runs``: the runs below a folder; put side by side, renamed or deleted."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from ..units import format_bytes


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("runs", help="list, compare, rename or delete runs", description=__doc__)
    parser.add_argument("root", nargs="?", default="runs", help="folder with the run folders; default: ./runs")
    acts = parser.add_mutually_exclusive_group()
    acts.add_argument("--compare", nargs="+", metavar="RUN", help="what differs between these runs, and their figures")
    acts.add_argument("--rename", nargs=2, metavar=("RUN", "NAME"), help="give a run's folder another name")
    acts.add_argument("--delete", metavar="RUN", help="delete a run's folder; says what would go, does it with --yes")
    parser.add_argument("--yes", action="store_true", help="really delete")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Do what was asked; without anything, print one line a run, newest first."""
    if options.compare:
        return _compare(options)
    if options.rename:
        from ..train.run_store import rename_run

        path = rename_run(*options.rename)
        print(json.dumps({"path": str(path)}) if options.json else path)
        return 0
    if options.delete:
        return _delete(options)
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


def _compare(options: argparse.Namespace) -> int:
    from ..pipeline.run_rows import compare_runs
    from ..report.runs_html import LETTERS, prediction_rows, setting_rows
    from ..report.tables import render_table

    found = compare_runs(options.compare)
    if options.json:
        rows = [dataclasses.asdict(row) for row in found.rows]
        print(json.dumps({"runs": rows, "settings": found.settings}, default=str))
        return 0
    letters = LETTERS[: len(found.rows)]
    for letter, row in zip(letters, found.rows, strict=True):
        loss = "no loss" if row.summary.loss is None else f"loss {row.summary.loss:.4f}"
        print(f"{letter}  {row.summary.name}  {row.summary.state}, {row.summary.num_steps_done} steps, {loss}")
    print(render_table(("setting", *letters), setting_rows(found.settings, str)) if found.settings else "same settings")
    print(render_table(("figure", *letters), prediction_rows(found.rows)))
    return 0


def _delete(options: argparse.Namespace) -> int:
    from ..train.run_store import delete_run, folder_bytes

    size = delete_run(options.delete) if options.yes else folder_bytes(options.delete)
    if options.json:
        print(json.dumps({"path": options.delete, "num_bytes": size, "deleted": options.yes}))
    elif options.yes:
        print(f"Deleted {options.delete}: {format_bytes(size)} are free.")
    else:
        print(f"{options.delete} takes {format_bytes(size)}. Nothing was deleted; add --yes to do it.")
    return 0
