"""``workbench models``: models that need no hub, and the catalogue that can be estimated offline."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("models", help="list known models and devices", description=__doc__)
    parser.add_argument("--devices", action="store_true", help="list the device table instead")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one name a line."""
    if options.devices:
        from ..hardware import device_names

        names = device_names()
    else:
        from ..components.source import model_names

        names = model_names()
    print(json.dumps(names) if options.json else "\n".join(names))
    return 0
