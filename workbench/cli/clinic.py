"""``workbench clinic``: a small real fault for each cause, and what the doctors say of it."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("clinic", help="switch a fault on and see what the doctors say", description=__doc__)
    parser.add_argument("cause", nargs="?", help="e.g. leak.graph_total; without one, all causes are listed")
    parser.add_argument("--healthy", action="store_true", help="run the twin without the fault")
    parser.add_argument("--source", action="store_true", help="print the code of the fault and do not run it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the list, the code, or what was found; 2 where there is no such fault."""
    from ..diagnose.causes import CAUSES
    from ..pipeline import clinic

    if options.cause is None:
        elsewhere = clinic.elsewhere()
        if options.json:
            print(json.dumps({"names": clinic.names(), "elsewhere": elsewhere}))
        else:
            print("\n".join(f"{name:38} {CAUSES[name].title}" for name in clinic.names()))
            print("\n".join(f"{name:38} {needs}" for name, needs in elsewhere.items()))
        return 0
    try:
        if options.source:
            print(clinic.source_of(options.cause), end="")
            return 0
        seen = clinic.run(options.cause, healthy=options.healthy)
    except ValueError as error:
        print(error)
        return 2
    if options.json:
        findings = [finding.to_dict() for finding in seen.findings]
        print(json.dumps({"cause": seen.cause, "is_named": seen.is_named, "findings": findings}, default=str))
    else:
        print(seen)
    return 0 if seen.is_named != options.healthy else 1
