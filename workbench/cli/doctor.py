"""``workbench doctor``: versions, devices, what looks wrong; with --bundle a zip for a bug report, without secrets."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("doctor", help="versions, devices, and a bundle for a bug report", description=__doc__)
    parser.add_argument("--bundle", metavar="FILE.zip", help="write what is printed, secrets masked, into a zip file")
    parser.add_argument("--run", dest="run_dir", metavar="RUN", help="add a run's recipe and events, without its data")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the environment, or write the bundle; 1 where something looks wrong, 2 for --run without --bundle."""
    from dataclasses import asdict

    from ..pipeline.bug_report import read_environment, write_bug_report

    if options.run_dir and not options.bundle:
        print("--run puts a run into the bundle: give --bundle FILE.zip as well.")
        return 2
    if options.bundle:
        path = write_bug_report(options.bundle, run_dir=options.run_dir)
        words = "Look through it before you send it: names of models and data files stay."
        print(json.dumps({"bundle": str(path)}) if options.json else f"{path} is written. {words}")
        return 0
    environment = read_environment()
    print(json.dumps(asdict(environment)) if options.json else environment)
    return 1 if environment.problems else 0
