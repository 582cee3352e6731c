"""``workbench check``: silent faults of a run to come, found in seconds; with --dry-step also whether it has room."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from .arguments import ProgressLine, add_recipe_arguments, read_recipe


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("check", help="look for silent faults before a run", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument(
        "--dry-step",
        action="store_true",
        help="also do two steps with the longest batch, an evaluation and a save; nothing of it stays",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was found; 1 where something was, 0 where nothing was."""
    recipe = read_recipe(options)
    from ..diagnose.finding import render_findings
    from ..pipeline import check, try_worst_batch

    progress = ProgressLine(options)
    findings = check(recipe, progress=progress)
    report = try_worst_batch(recipe, progress=progress) if options.dry_step else None
    progress.clear()
    if options.json:
        values = {
            "findings": [finding.to_dict() for finding in findings],
            "dry_step": None if report is None else dataclasses.asdict(report),
        }
        print(json.dumps(values, default=str))
    else:
        print(render_findings(findings))
        if report is not None:
            fixes = report.finding.fixes[1:] if report.finding is not None else ()
            print("\n".join([report.text, *(f"    or: {fix.text}" for fix in fixes)]))
    return 1 if findings or (report is not None and not report.fits) else 0
