"""Grade the estimate against published measurements, beside the public planners.

Run: ``python -m benchmarks.accuracy [--rows FILE] [--json] [--planners] [--only TEXT] [--markdown FILE] [--store]``;
``--readme`` prints README's table from what ``--store`` kept.

``FILE`` is a JSON list of rows of the schema of ``benchmarks/data/measured_runs.json``, the default. Every row is
mapped to a Recipe, or listed with the reason why not. Counters are never pooled: allocated, reserved and process bytes
are graded apart, and so is every source. Exits 1 when a target of ``accuracy_rows/targets.py`` is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.accuracy_rows import MappedRow, UnmappedRow, map_row
from benchmarks.accuracy_rows.grade import Grade, Grader, count_verdicts, summarize, unmapped_reasons
from benchmarks.accuracy_rows.report import render_markdown, render_readme, render_text
from benchmarks.accuracy_rows.row import grades_memory, grades_speed, source_name
from benchmarks.accuracy_rows.targets import Check, check_targets, misses

ROWS = Path(__file__).parent / "data" / "measured_runs.json"
STORED = Path(__file__).parent / "data" / "accuracy.json"


def main(argv: list[str] | None = None) -> int:
    """Grade the rows and print the tables; returns the exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.readme:
        print(render_readme(json.loads(STORED.read_text(encoding="utf-8"))))
        return 0
    started = time.perf_counter()
    rows = json.loads(arguments.rows.read_text(encoding="utf-8"))
    chosen = [row for row in rows if not arguments.only or arguments.only in f"{row['id']} {source_name(row)}"]
    mapped, unmapped = split_rows(chosen)
    grades = grade_rows(mapped, progress=not arguments.json)
    planners: dict[str, Any] = {}
    if arguments.planners:
        from benchmarks.planners import run_planners

        planners = run_planners([grade.mapped for grade in grades if grades_memory(grade.mapped.row)])
    elapsed_s = time.perf_counter() - started
    if arguments.markdown:
        text = render_markdown(chosen, grades, unmapped, planners)
        arguments.markdown.write_text(text, encoding="utf-8")
    if arguments.json:
        print(json.dumps(to_dict(chosen, grades, unmapped, planners, elapsed_s), indent=1))
    else:
        print(render_text(chosen, grades, unmapped, planners))
        print(f"\n{elapsed_s:.0f} s")
    checks = check_targets(chosen, unmapped, summarize(grades), count_verdicts(grades), grades)
    if arguments.store:
        STORED.write_text(json.dumps(to_store(grades, checks), indent=1) + "\n", encoding="utf-8")
    return 0 if all(check.met for check in checks) else 1


def to_store(grades: list[Grade], checks: list[Check]) -> dict[str, Any]:
    """Return what README's table is made from, rounded so that the same code stores the same text."""
    summaries = [
        {key: round(value, 5) if isinstance(value, float) else value for key, value in vars(summary).items()}
        for summary in sorted(summarize(grades), key=lambda item: (item.source, item.counter))
    ]
    verdicts = [vars(count) for count in count_verdicts(grades)]
    return {"summaries": summaries, "verdicts": verdicts, "targets": [vars(check) for check in checks]}


def split_rows(rows: list[dict[str, Any]]) -> tuple[list[MappedRow], list[UnmappedRow]]:
    """Return the rows that can be expressed and those that cannot."""
    mapped, unmapped = [], []
    for row in rows:
        result = map_row(row)
        if isinstance(result, UnmappedRow):
            unmapped.append(result)
        else:
            mapped.append(result)
    return mapped, unmapped


def grade_rows(rows: list[MappedRow], *, progress: bool) -> list[Grade]:
    """Estimate and grade every row that is recommended for memory or for speed with a known step time."""
    grader = Grader()
    grades = []
    for index, row in enumerate(rows):
        if grades_memory(row.row) or (grades_speed(row.row) and row.step_s):
            grades.append(grader.grade(row))
            if progress:
                sys.stderr.write(f"\r{index + 1}/{len(rows)} {row.row['id']} ")
                sys.stderr.flush()
    if progress:
        sys.stderr.write("\n")
    return grades


def to_dict(
    rows: list[dict[str, Any]],
    grades: list[Grade],
    unmapped: list[UnmappedRow],
    planners: dict[str, Any],
    elapsed_s: float,
) -> dict[str, Any]:
    """Return everything as plain values: summaries, verdicts, every row's errors, reasons of unmapped rows."""
    return {
        "num_rows": len(rows),
        "summaries": [vars(summary) for summary in summarize(grades)],
        "verdicts": [vars(count) for count in count_verdicts(grades)],
        "rows": [
            {
                "id": grade.mapped.row["id"],
                "source": source_name(grade.mapped.row),
                "errors": {
                    counter: {"estimated": pair[0], "measured": pair[1], "relative": grade.relative(counter)}
                    for counter, pair in grade.errors.items()
                },
                "verdict": grade.verdict,
                "finished": grade.finished,
                "spare_fraction": grade.spare_fraction,
                "peak_phase": grade.peak_phase,
                "failure": grade.failure,
                "differences": list(grade.mapped.differences),
            }
            for grade in grades
        ],
        "targets": [
            vars(check) for check in check_targets(rows, unmapped, summarize(grades), count_verdicts(grades), grades)
        ],
        "misses": [list(miss) for miss in misses(grades, summarize(grades))],
        "unmapped": unmapped_reasons(unmapped),
        "planners": {
            name: {key: vars(figure) for key, figure in figures.items()} for name, figures in planners.items()
        },
        "elapsed_s": elapsed_s,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.accuracy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS, help="JSON list of measured rows")
    parser.add_argument("--json", action="store_true", help="print plain values, every row included")
    parser.add_argument("--planners", action="store_true", help="also run the public planners on the same rows")
    parser.add_argument("--only", default="", help="only rows whose id or source holds this text")
    parser.add_argument("--markdown", type=Path, help="write the tables as Markdown, as in docs/accuracy.md")
    parser.add_argument("--store", action="store_true", help=f"keep the summary in {STORED.name} for --readme")
    parser.add_argument("--readme", action="store_true", help="print README's table from the stored summary")
    return parser


if __name__ == "__main__":
    sys.exit(main())
