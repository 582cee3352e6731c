"""``workbench VERB``: parses, calls one verb, turns its errors into one message and an exit code.

Exit codes: 0 done, 1 the work failed, 2 the settings are wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ..errors import Cancelled, RecipeError, WorkbenchError
from . import calibrate, chat, check, clinic, compare, doctor, estimate, export, lab, launch, models, plan, runs, train

VERBS = (lab, calibrate, estimate, plan, compare, check, clinic, train, launch, export, chat, runs, models, doctor)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with one sub-command per verb."""
    parser = argparse.ArgumentParser(
        prog="workbench", description="Fine-tune Hugging Face models: estimate, train, watch, explain."
    )
    from .. import __version__

    parser.add_argument("--version", action="version", version=f"workbench {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for module in VERBS:
        module.add_parser(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except RecipeError as error:
        _report(options, str(error), kind="RecipeError", problems=[str(problem) for problem in error.problems])
        return 2
    except Cancelled as error:
        _report(options, str(error), kind="Cancelled")
        return 130
    except WorkbenchError as error:
        _report(options, str(error), kind=type(error).__name__)
        return 1
    except BrokenPipeError:  # The reader of our output (head, less) went away: not our failure.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


def _report(options: argparse.Namespace, message: str, **details: object) -> None:
    print(message, file=sys.stderr)
    if getattr(options, "json", False):
        print(json.dumps({"error": {"message": message, **details}}))


if __name__ == "__main__":
    sys.exit(main())
