"""HTML from plain data: what must be said is said, and nothing that comes from outside is markup."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.components.preview import PreviewRow
from workbench.errors import DataError, Problem, RecipeError, RunError
from workbench.estimate.estimate import BatchShape, Estimate, MemoryEstimate, TimeEstimate
from workbench.events import Timeline
from workbench.plan.plan import PlanOption
from workbench.report.data_html import render_data_facts, render_preview
from workbench.report.html import (
    describe_error,
    render_effects,
    render_error,
    render_estimate,
    render_failure,
    render_option,
)
from workbench.report.run_html import render_result, render_run_facts, render_run_head
from workbench.report.text import (
    describe_breakdown,
    describe_effect,
    describe_estimate,
    describe_run,
    describe_time_left,
)
from workbench.units import GIB, MIB

PAYLOAD = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def estimate(verdict: str = "fits", notes: tuple[str, ...] = (), **time: Any) -> Estimate:
    memory = MemoryEstimate(
        peak_allocated_bytes=2 * GIB,
        peak_reserved_bytes=3 * GIB,
        process_bytes=int(3.5 * GIB),
        capacity_bytes=15 * GIB,
        interval_bytes=(3 * GIB, 4 * GIB),
        verdict=verdict,  # type: ignore[arg-type]
        breakdown={"parameter": 2 * GIB, "activation": GIB, "context": GIB // 2},
        peak_phase="backward",
        peak_step=1,
        rest_bytes=GIB,
        host_bytes=0,
        peak_by_phase={},
        holders=(),
        timeline=Timeline({}, []),
    )
    defaults: dict[str, Any] = {
        "step_s": 0.25, "tokens_per_s": 1234.0, "samples_per_s": 4.0, "seconds_by_class": {}, "flops": 1e12,
        "basis": "table", "interval_s": (0.2, 0.4),
    }  # fmt: skip
    return Estimate(
        recipe_digest="x", device_name="Tesla T4", num_parameters=135_000_000, num_trainable_parameters=4_900_000,
        shape=BatchShape(2, 512, 512, 512, False, "max_length"), memory=memory,
        time=TimeEstimate(**{**defaults, **time}), notes=notes,
    )  # fmt: skip


@pytest.mark.parametrize(("verdict", "words"), [("fits", "fits"), ("tight", "tight"), ("does_not_fit", "does not fit")])
def test_estimate_says_its_verdict_in_words(verdict: str, words: str) -> None:
    html = render_estimate(estimate(verdict))
    assert f"wb-verdict-{verdict}" in html
    assert f"</span> {words}</span>" in html
    for part in (
        "3.5 GiB",
        "15 GiB",
        "3 GiB to 4 GiB",
        "250 ms",
        "3 to 4 GiB",
        "200 to 400 ms",
        "1.234k tokens/s",
        "backward, step 2",
        "4.9M of 135M",
    ):
        assert part in html, part
    assert "from the device table" in html


def test_estimate_says_what_is_not_known() -> None:
    assert "not known" in render_estimate(estimate())
    html = render_estimate(estimate(total_s=4000.0, num_steps=16000, cost_usd=(0.1, 0.4)))
    assert "1 h 6 min" in html
    assert "16000 steps, $0.10 to 0.40" in html


def test_notes_are_escaped_and_counted() -> None:
    html = render_estimate(estimate(notes=(PAYLOAD, "second")))
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "2 notes on this estimate" in html


def test_estimate_as_one_line() -> None:
    assert describe_estimate(estimate("tight")) == (
        "Estimated for Tesla T4: tight: 3.5 GiB of 15 GiB (3 GiB to 4 GiB), peak in backward, "
        "250 ms per step, 1.234k tokens/s"
    )


@dataclass
class Effect:
    value: Any
    memory_delta_bytes: int
    step_delta_s: float | None
    verdict: str


def test_effects_show_one_and_fold_the_others() -> None:
    effects = [Effect(i, (i - 2) * GIB, 0.01 * i, "fits" if i < 4 else "tight") for i in range(5)]
    html = render_effects(effects, [f"<v{i}>" for i in range(5)], "fits")
    shown = html[: html.index("</summary>")]
    assert "&lt;v0&gt;: −2 GiB" in shown
    assert "v1" not in shown
    assert ">+4<" in shown
    assert "&lt;v4&gt;: +2 GiB · +40 ms → tight" in html
    assert html.count("wb-chip-less") == 2
    assert "<details" not in render_effects(effects[:1], ["on"], "fits")


def test_option_says_what_it_takes() -> None:
    html = render_option("training.optim = <adafactor>", PlanOption({}, 2 * GIB, 1.5, "tight"))
    assert "&lt;adafactor&gt;" in html
    assert "tight with 2 GiB, 1.5 s per step; the run learns the same" in html
    altering = PlanOption({}, 2 * GIB, 1.5, "fits", alters=("keeps <weights> in 4 bits",))
    assert "per step; keeps &lt;weights&gt; in 4 bits" in render_option("4-bit base: on", altering)


def test_effect_in_words() -> None:
    assert describe_effect(-1.5 * GIB, 0.03) == "−1.5 GiB · +30 ms"
    assert describe_effect(1000, None) == "no effect"
    assert describe_effect(0, -0.002) == "−2 ms"


def row(tokens: list[tuple[str, bool]], **values: Any) -> PreviewRow:
    learned = sum(flag for _, flag in tokens)
    return PreviewRow(
        tokens, values.get("cut", False), len(tokens), len(tokens) + 5, learned, values.get("place", "f, line 1")
    )


def test_preview_marks_what_is_learned_and_escapes_all() -> None:
    html = render_preview(
        [row([("Hi ", False), (PAYLOAD, False), ("yes", True), ("!", True)], cut=True, place=PAYLOAD)]
    )
    assert "<script>" not in html
    assert "<img" not in html
    assert '<span class="wb-learned">yes!</span>' in html, "tokens of one kind are one span"
    assert "cut from 9" in html
    assert "4 tokens" in html


def test_preview_of_a_huge_row_is_cut_for_the_page_only() -> None:
    html = render_preview([row([("x" * 100, True)] * 1000)])
    assert len(html) < 8000
    assert "the rest of this row is not shown" in html


def test_data_facts_name_bad_rows() -> None:
    report = SimpleNamespace(
        padding=SimpleNamespace(longest=0.123, group_by_length=0.0, packing=0.01, max_length=0.6),
        num_evaluation_rows=64, supervised_fraction=0.63, truncated_fraction=0.004, notes=(PAYLOAD,), format="chats",
        classes={PAYLOAD: 3},
        bad_rows=tuple(f"rows.jsonl, line {i}: {PAYLOAD}" for i in range(9)), num_bad_rows=20,
    )  # fmt: skip
    prepared = SimpleNamespace(report=report, lengths=[1] * 3700, num_tokens=419_000)
    html = render_data_facts(prepared, 128)
    assert "<script>" not in html
    assert "20 rows cannot be used" in html
    assert "and 15 more" in html
    for part in ("0.4 %", "63 %", "12 %", "60 %", "rows cut at 128"):
        assert part in html


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_errors_are_alerts_in_words_with_the_traceback_folded() -> None:
    html = render_error(raised(DataError(f"{PAYLOAD} cannot be read.")), "The preview failed")
    assert 'role="alert"' in html
    assert "<script>" not in html
    assert "<details><summary>Traceback" in html
    assert "<b>The preview failed.</b>" in html
    assert "<details" not in render_error(DataError("never raised"))


def test_foreign_errors_keep_their_type() -> None:
    assert describe_error(raised(ZeroDivisionError("by zero"))) == "ZeroDivisionError: by zero"
    assert describe_error(KeyError()) == "KeyError"
    wrapped = RunError("")
    wrapped.__cause__ = ValueError("inside")
    assert describe_error(wrapped) == "ValueError: inside"
    html = render_failure(PAYLOAD, PAYLOAD, "The run failed")
    assert "<script>" not in html
    assert "Traceback, for a bug report" in html
    assert "<details" not in render_failure("words", "")


def test_all_problems_are_listed() -> None:
    html = render_error(RecipeError([Problem("a.b", "is wrong"), Problem("c.d", PAYLOAD)]))
    assert html.count("<li>") == 2
    assert "<script>" not in html


def test_run_texts() -> None:
    assert describe_run("done", 500, 500, 1.23456) == "Fine-tuning panel: done, step 500 of 500, loss 1.235"
    assert describe_run("preparing", 0, None, None) == "Fine-tuning panel: preparing"
    assert describe_time_left(10, 40, 2.0) == "about 1 min 0 s left"
    assert describe_time_left(40, 40, 2.0) == describe_time_left(1, None, 2.0) == describe_time_left(1, 2, None) == ""
    assert (
        describe_breakdown({"parameter": MIB, "activation": 2 * MIB, "input": 0}) == "activations 2 MiB, weights 1 MiB"
    )


def test_run_html() -> None:
    head = render_run_head("running", PAYLOAD)
    assert "<script>" not in head
    assert 'role="status"' in head
    figures = SimpleNamespace(
        loss=2.5, eval_loss=None, grad_norm=float("nan"), learning_rate=2e-4, tokens_per_s=8000.0, memory_bytes=GIB,
        seconds_per_step=0.1, elapsed_s=12.0, cost_usd=0.5, usd_per_1000_tokens=0.002,
        utilization_mean=0.9, loss_drop_per_1000_tokens=0.25,
    )  # fmt: skip
    html = render_run_facts(figures)
    assert "Held-out" not in html
    assert "Gradient norm" not in html
    assert "90 %" in html and "$0.50" in html and "$2.00" in html
    assert "2e-4" in html
    saved = render_result("stopped", "step 7 of 40", 2.5, Path("runs/a"), Path("runs/a/adapter"))
    assert "<b>Stopped</b> at step 7 of 40, loss 2.5." in saved
    assert "runs/a/adapter" in saved
    assert "wb-note-bad" in render_result("failed", "step 0", None, Path("runs/a"), None)
