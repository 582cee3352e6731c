"""Tables of the graded rows, as text and as Markdown. No decisions here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .grade import Grade, count_verdicts, summarize, unmapped_reasons
from .row import UnmappedRow, grades_memory, source_name
from .targets import check_targets, misses

Table = tuple[str, list[str], list[list[str]]]

# What README shows: peaks, not their parts.
README_COUNTERS = ("allocated", "reserved", "reserved p99", "process", "nvidia-smi", "step time")

_PREFACE = """# How far the estimate is off

Printed by `python -m benchmarks.accuracy --planners --store --markdown docs/accuracy.md`; not edited by hand.

Published measurements, each mapped to a Recipe, its batch, its device and what its training script keeps alive. No
constant of the estimator was fitted to these rows, with one exception that the table cannot grade: what a T4 takes
outside the allocator (141 MiB, `context`, a part of `process`) was read in the same T4 files. The T4's
reserved bytes are no blind test either. Three things were chosen with these rows in view: that segments get addresses
from high to low; that threads read quantised weights ahead and no cache is emptied, which for the rows of torch 2.14
goes against the text of the versions they name; and that packing a weight takes 1 ms (0.5 to 2 ms give about the same
means of 1.3 to 1.5 % over the 29 quantised rows, 0 ms puts F0054 18 % too high).

Errors are estimated / measured - 1, and counters are never pooled.
What runs today is transformers' code of today: rows of older stacks, of other people's model code (LitGPT, Qwen) and of
fused kernels (fms-acceleration's foak and liger) are extrapolations, with the differences named in `--json`.
"""


def render_text(
    rows: Sequence[Mapping[str, Any]],
    grades: Sequence[Grade],
    unmapped: Sequence[UnmappedRow],
    planners: Mapping[str, Any],
) -> str:
    """Return all tables in columns for a terminal."""
    parts = []
    for title, header, body in _tables(rows, grades, unmapped, planners):
        widths = [max(len(line[index]) for line in [header, *body]) for index in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in [header, *body]
        ]
        parts.append("\n".join([title, "-" * len(title), *lines]))
    return "\n\n".join(parts)


def render_markdown(
    rows: Sequence[Mapping[str, Any]],
    grades: Sequence[Grade],
    unmapped: Sequence[UnmappedRow],
    planners: Mapping[str, Any],
) -> str:
    """Return all tables as one Markdown page."""
    parts = [_PREFACE]
    for title, header, body in _tables(rows, grades, unmapped, planners):
        lines = ["| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *body]]
        parts.append("\n".join([f"## {title}", "", *lines, ""]))
    return "\n".join(parts)


def _tables(
    rows: Sequence[Mapping[str, Any]],
    grades: Sequence[Grade],
    unmapped: Sequence[UnmappedRow],
    planners: Mapping[str, Any],
) -> list[Table]:
    tables = [_targets(rows, grades, unmapped), _coverage(rows, unmapped), _errors(grades), _verdicts(grades)]
    if planners:
        tables.append(_side_by_side(grades, planners))
        tables.append(_silent_planners(planners))
    failures = [[grade.mapped.row["id"], grade.failure[:160]] for grade in grades if grade.failure]
    if failures:
        tables.append(("Rows whose estimate failed", ["row", "why"], failures))
    tables += [_misses(grades), _reasons(unmapped)]
    return tables


def _targets(rows: Sequence[Mapping[str, Any]], grades: Sequence[Grade], unmapped: Sequence[UnmappedRow]) -> Table:
    checks = check_targets(rows, unmapped, summarize(grades), count_verdicts(grades), grades)
    body = [[check.target, check.seen, "yes" if check.met else "no"] for check in checks]
    return ("Targets", ["target", "seen", "met"], body)


def _misses(grades: Sequence[Grade]) -> Table:
    groups: dict[tuple[str, str], list[str]] = {}
    for key, counter, error, cause in misses(grades, summarize(grades)):
        groups.setdefault((counter, cause), []).append(f"{key} {_signed(error)}")
    body = [[counter, cause, ", ".join(rows)] for (counter, cause), rows in groups.items()]
    return ("Rows beyond a target that is missed", ["counter", "cause, and what was tried", "rows"], body)


def render_readme(stored: Mapping[str, Any]) -> str:
    """Return README's table from stored results: the counters that have a target, the worst row and the verdicts."""
    lines = ["| rows | counter | n | median | mean | worst |", "| --- | --- | --- | --- | --- | --- |"]
    for item in stored["summaries"]:
        if item["counter"] in README_COUNTERS:
            cells = [item["source"], item["counter"], str(item["num_rows"]), _percent(item["median"])]
            lines.append("| " + " | ".join([*cells, _percent(item["mean"]), _signed(item["worst"])]) + " |")
    met = sum(check["met"] for check in stored["targets"])
    finished = sum(count["num_finished"] for count in stored["verdicts"])
    failed = sum(count["num_failed"] for count in stored["verdicts"])
    false_fits = sum(count["false_fits"] for count in stored["verdicts"])
    clear = sum(count["clear"] for count in stored["verdicts"])
    called = sum(count["clear_called_fits"] for count in stored["verdicts"])
    lines += [
        "",
        f"Of {failed} runs that ran out of memory {false_fits} are said to fit; of {clear} runs (of {finished} that "
        f"finished) with 10 % of the card to spare {called} are. {met} of {len(stored['targets'])} targets are met. "
        "Rows of a T4 ran transformers 5; all others ran older or other code, and are extrapolated. The T4's reserved "
        "bytes are no blind test: the order of addresses, that threads read weights ahead, and the 1 ms that packing a "
        "weight is assumed to take were chosen with these rows in view.",
    ]
    return "\n".join(lines)


def _coverage(rows: Sequence[Mapping[str, Any]], unmapped: Sequence[UnmappedRow]) -> Table:
    without = {item.row["id"] for item in unmapped}
    names = list(dict.fromkeys(source_name(row) for row in rows))
    body = []
    for name in names:
        members = [row for row in rows if source_name(row) == name]
        memory = [row for row in members if grades_memory(row)]
        strict = [row for row in memory if row["completeness"] == "A" and row["n_gpus"] == 1]
        body.append([name, str(len(members)), *(_share(group, without) for group in (memory, strict))])
    memory = [row for row in rows if grades_memory(row)]
    strict = [row for row in memory if row["completeness"] == "A" and row["n_gpus"] == 1]
    body.append(["all", str(len(rows)), *(_share(group, without) for group in (memory, strict))])
    return ("Rows mapped", ["source", "rows", "for memory: mapped", "class A, one GPU: mapped"], body)


def _share(rows: Sequence[Mapping[str, Any]], without: set[str]) -> str:
    return f"{sum(row['id'] not in without for row in rows)} of {len(rows)}" if rows else "-"


def _errors(grades: Sequence[Grade]) -> Table:
    body = [
        [
            item.source,
            item.counter,
            str(item.num_rows),
            _percent(item.median),
            _percent(item.mean),
            f"{_signed(item.worst)} ({item.worst_id})",
            _signed(item.bias),
        ]
        for item in sorted(summarize(grades), key=lambda item: (item.source, item.counter))
    ]
    return ("Errors", ["source", "counter", "n", "median", "mean", "worst", "bias"], body)


def _verdicts(grades: Sequence[Grade]) -> Table:
    header = [
        "source",
        "finished",
        "failed",
        "false fits",
        "false does not fit",
        "tight",
        "10 % to spare: fits",
        "fits below what was read",
    ]
    counts = count_verdicts(grades)
    body = [
        [
            count.source,
            str(count.num_finished),
            str(count.num_failed),
            str(count.false_fits),
            str(count.false_misfits),
            f"{count.tight} ({_percent(count.tight / max(1, count.num_finished + count.num_failed))})",
            f"{count.clear_called_fits} of {count.clear}",
            f"{count.contradicted_fits} of {count.num_contradictable}",
        ]
        for count in counts
    ]
    clear, called = sum(count.clear for count in counts), sum(count.clear_called_fits for count in counts)
    total = sum(count.num_finished + count.num_failed for count in counts)
    tight, tried = sum(count.tight for count in counts), sum(count.num_contradictable for count in counts)
    body.append(
        [
            "all",
            str(sum(count.num_finished for count in counts)),
            str(sum(count.num_failed for count in counts)),
            str(sum(count.false_fits for count in counts)),
            str(sum(count.false_misfits for count in counts)),
            f"{tight} ({_percent(tight / max(1, total))})",
            f"{called} of {clear} ({_percent(called / max(1, clear))})",
            f"{sum(count.contradicted_fits for count in counts)} of {tried}",
        ]
    )
    return ("Verdicts", header, body)


def _side_by_side(grades: Sequence[Grade], planners: Mapping[str, Any]) -> Table:
    body = []
    for source in dict.fromkeys(source_name(grade.mapped.row) for grade in grades):
        members = {grade.mapped.row["id"]: grade for grade in grades if source_name(grade.mapped.row) == source}
        for name, figures in planners.items():
            for counter in ("allocated", "reserved", "reserved p99", "process", "nvidia-smi"):
                theirs, ours, fitted, wrong = [], [], False, 0
                for key, grade in members.items():
                    figure = figures.get(key)
                    said = figure.num_bytes.get(_planner_counter(counter)) if figure else None
                    if said is None or counter not in grade.errors:
                        continue
                    fitted = fitted or figure.is_fitted
                    theirs.append(said / grade.errors[counter][1] - 1.0)
                    ours.append(grade.relative(counter))
                    wrong += bool(figure.fits) and not grade.finished
                if theirs:
                    body.append(
                        [
                            source,
                            counter,
                            name + (" (fitted to these rows)" if fitted else ""),
                            str(len(theirs)),
                            *(_mean_and_worst(errors) for errors in (theirs, ours)),
                        ]
                    )
    return (
        "Beside public planners, on the rows they can express",
        ["source", "counter", "planner", "n", "planner: mean, worst", "ours: mean, worst"],
        body,
    )


def _planner_counter(counter: str) -> str:
    return {"nvidia-smi": "process", "reserved p99": "reserved"}.get(counter, counter)


def _silent_planners(planners: Mapping[str, Any]) -> Table:
    body = []
    for name, figures in planners.items():
        reasons: dict[str, int] = {}
        for figure in figures.values():
            if not figure.num_bytes:
                reasons[figure.reason] = reasons.get(figure.reason, 0) + 1
        body += [[name, str(count), reason] for reason, count in sorted(reasons.items(), key=lambda item: -item[1])]
    return ("Rows a planner has no figure for", ["planner", "rows", "why"], body)


def _reasons(unmapped: Sequence[UnmappedRow]) -> Table:
    reasons = sorted(unmapped_reasons(unmapped).items(), key=lambda item: -len(item[1]))
    body = [[str(len(ids)), reason, ", ".join(ids[:4]) + (" ..." if len(ids) > 4 else "")] for reason, ids in reasons]
    return ("Rows that are not mapped", ["rows", "why", "which"], body)


def _mean_and_worst(errors: Sequence[float]) -> str:
    return f"{_percent(statistics.fmean(map(abs, errors)))}, {_signed(max(errors, key=abs))}"


def _percent(value: float) -> str:
    return f"{value * 100:.1f} %"


def _signed(value: float) -> str:
    return f"{value * 100:+.1f} %"
