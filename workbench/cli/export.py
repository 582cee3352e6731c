"""``workbench export``: a run's result for use elsewhere, read back and graded against the merged model."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..units import format_bytes
from .arguments import ProgressLine


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    from ..export.formats import FORMATS

    parser = verbs.add_parser(
        "export", help="adapter, merged model, GGUF, ONNX, 8 and 4 bits, script or report of a run", description=__doc__
    )
    parser.add_argument("run_dir", metavar="RUN", help="folder of a run")
    text = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())
    parser.add_argument("--to", required=True, choices=list(FORMATS), help=text)
    parser.add_argument("--out", metavar="DIR", help="folder to make; default: exports/FORMAT in the run's folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the export and say what was found when it was read back."""
    from ..export import export_run
    from ..export.page import GRADE_HEADER, grade_cells

    progress = ProgressLine(options)
    report = export_run(options.run_dir, options.to, options.out, progress=progress)
    progress.clear()
    if options.json:
        print(json.dumps(report.to_dict()))
        return 0
    print(f"{report.path}  {format_bytes(report.num_bytes)}")
    for name, value in report.checks.items():
        print(f"  {name.replace('_', ' ')}: {value:.4g}" if isinstance(value, float) else f"  {name}: {value}")
    if report.grade is not None:
        print("  against the merged model in float32, on the same rows:")
        for name, cell in zip(GRADE_HEADER[1:], grade_cells(report.format, report.grade)[1:], strict=True):
            print(f"    {name}: {cell}")
        print(f"    rows: {report.grade['num_rows']} {report.grade['rows']}, {report.grade['num_tokens']} tokens")
    return 0
