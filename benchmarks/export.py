"""What each export format loses: size, accuracy and speed of real exports, after a short LoRA run.

Run: ``python -m benchmarks.export [--quick] [--formats gguf-q8_0 onnx ...] [--keep DIR] [--json]``

It trains smollm2-135m-instruct on python-docs (``--quick``: tiny-llama), exports the run to every format, and prints
the grade of each: against the merged model in float32, on the same held-out rows. A format that cannot be made here is
listed with the sentence it was refused with. Exits 1 when a format loses more than its bits allow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.export import export_run
from workbench.export.formats import FORMATS, WEIGHT_BITS
from workbench.export.page import GRADE_HEADER, grade_cells
from workbench.report.tables import render_table

# Perplexity may rise by this share at most, by the bits of the weights. 4 bits without calibration took a third to a
# half from so small a model on 408 tokens; what is broken takes many times that.
ALLOWED_RISE = {32: 0.001, 16: 0.01, 8: 0.1, 4: 1.0}


def train(folder: Path, *, quick: bool, steps: int) -> None:
    """Train the run that is exported."""
    settings = ["--model.name_or_path=tiny-llama"] if quick else ["--preset", "quick"]
    limits = [f"--training.max_steps={steps}", "--evaluation.max_rows=16", "--evaluation.eval_steps=0"]
    where = ["--hardware.device=cpu", "--out", str(folder), "--json"]
    command = [sys.executable, "-m", "workbench.cli.main", "train", *settings, *limits, *where]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def export(folder: Path, to: str) -> dict[str, Any]:
    """Export the run and return its grade, or why it was refused."""
    started = time.perf_counter()
    try:
        report = export_run(folder, to)
    except WorkbenchError as error:
        return {"format": to, "refused": str(error)}
    return {"format": to, "seconds": time.perf_counter() - started, "grade": report.grade}


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for every format that lost more than its bits allow."""
    found = []
    for row in rows:
        if "refused" in row:
            continue
        if row["grade"] is None:
            found.append(f"{row['format']} was not graded")
            continue
        rise = row["grade"]["perplexity"] / row["grade"]["merged_perplexity"] - 1
        allowed = ALLOWED_RISE[WEIGHT_BITS[row["format"]]]
        if rise > allowed:
            found.append(f"{row['format']}: perplexity rises by {rise:.1%}, allowed are {allowed:.1%}")
    return found


def main() -> int:
    """Train, export to every format, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny-llama")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--formats", nargs="+", choices=list(WEIGHT_BITS), default=list(WEIGHT_BITS))
    parser.add_argument("--keep", metavar="DIR", help="run folder to make, or one that was made before")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(options.keep or Path(root) / "run")
        if not (folder / "adapter").is_dir():
            train(folder, quick=options.quick, steps=options.steps)
        rows = [export(folder, to) for to in options.formats]
    failed = failures(rows)
    if options.json:
        print(json.dumps({"steps": options.steps, "exports": rows, "failed": failed}))
        return 1 if failed else 0
    graded = [row for row in rows if row.get("grade")]
    print(render_table(GRADE_HEADER, [grade_cells(row["format"], row["grade"]) for row in graded]))
    for row in rows:
        if "refused" in row:
            print(f"{row['format']} ({FORMATS[row['format']]}): {row['refused']}")
    print("\n".join(failed) or "every format keeps what its bits allow")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
