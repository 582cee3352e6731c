"""Targets of the accuracy benchmark decide its exit code; README shows what was stored."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.accuracy import STORED
from benchmarks.accuracy_rows.grade import Summary, Verdicts
from benchmarks.accuracy_rows.report import render_readme
from benchmarks.accuracy_rows.targets import bound_of, cause_of, check_targets

README = Path(__file__).parents[3] / "README.md"
BEGIN, END = "<!-- accuracy: python -m benchmarks.accuracy --readme -->\n", "\n<!-- end of accuracy -->"


def _summary(source: str, counter: str, error: float) -> Summary:
    return Summary(source, counter, 3, error, error, -error, "X1", -error)


def _verdicts(*, false_fits: int = 0, clear: int = 10, called: int = 10) -> Verdicts:
    return Verdicts("LitGPT", 10, 2, false_fits, 0, 0, clear, called, 0, 0)


def _met(summaries: list[Summary], verdicts: list[Verdicts]) -> list[bool]:
    return [check.met for check in check_targets([], [], summaries, verdicts, [])]


def test_errors_are_held_to_the_bound_of_their_source_and_counter() -> None:
    t4 = "fitcheck-llm T4, torch 2.14.0"
    assert _met([_summary(t4, "reserved", 0.015)], []) == [True, True]
    assert _met([_summary(t4, "reserved", 0.03)], []) == [False, True]  # mean 2 %, worst 6 %
    assert _met([_summary("LitGPT config_hub", "allocated", 0.03)], []) == [True]
    assert _met([_summary("LitGPT config_hub", "allocated", 0.05)], []) == [False]
    assert bound_of(_summary(t4, "context", 1.0)) is None


def test_one_false_fit_misses_and_tight_runs_may_be_a_fifth() -> None:
    assert _met([], [_verdicts()]) == [True, True]
    assert _met([], [_verdicts(false_fits=1)]) == [False, True]
    assert _met([], [_verdicts(called=7)]) == [True, False]


def test_every_missed_target_of_the_stored_results_has_a_cause() -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    for item in stored["summaries"]:
        bound = bound_of(Summary(**item))
        if bound is not None and bound.median is not None and item["median"] > bound.median:
            assert cause_of(item["source"], item["counter"]), f"{item['source']}, {item['counter']} has no cause"


def test_readme_shows_the_stored_results() -> None:
    text = README.read_text(encoding="utf-8")
    assert BEGIN in text, "README has no section of accuracy"
    shown = text.split(BEGIN)[1].split(END)[0]
    assert shown == render_readme(json.loads(STORED.read_text(encoding="utf-8")))
