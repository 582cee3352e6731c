"""What the estimate has to reach on the given rows, and why a row misses it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .grade import Grade, Summary, Verdicts
from .row import UnmappedRow, grades_memory, source_name

_T4 = "fitcheck-llm T4"
# Share of one-GPU rows of class A that have to be mapped, and of finished runs with room to spare that "fit".
MIN_MAPPED, MIN_CLEAR = 0.90, 0.80
# Median error of the step time: over all published rows of one GPU, and over those of each source.
STEP_TIME = 0.12


@dataclass(frozen=True)
class Bound:
    """A bound on the errors of one source and counter; None where a statistic is not bounded."""

    source: str
    counter: str
    median: float | None = None
    mean: float | None = None
    worst: float | None = None

    def applies(self, summary: Summary) -> bool:
        """Whether the bound is about this summary; an empty source or counter means every one."""
        return summary.source.startswith(self.source) and summary.counter == self.counter


# Transformers 5 on a T4 is what runs today. The others ran older code: a median for each source.
_MEMORY = ("allocated", "reserved", "reserved p99", "process", "nvidia-smi")
BOUNDS = (
    Bound(_T4, "allocated", mean=0.01, worst=0.03),
    Bound(_T4, "reserved", mean=0.02, worst=0.06),
    Bound(_T4, "process", mean=0.02, worst=0.06),
    *(Bound("", counter, median=0.04) for counter in _MEMORY),
    Bound("", "step time", median=STEP_TIME),
)

# Why rows of a source miss their bound, and what was tried: ``(source, counter, cause)``, the first that fits.
CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        "LitGPT",
        "allocated",
        "LitGPT's own model code: fused, zero-padded adapters, a quantised head, its own rotary embedding. Tried: the "
        "script's order, the head in chunks, an untied head, and with nf4 what bitsandbytes 0.42 keeps (the input of "
        "every product, until the next iteration assigns its loss), which halves the miss.",
    ),
    (
        "transformers docs, BERT",
        "reserved",
        "torch 1.10 and transformers of 2022: the card's NVML reading minus the context read before training, which "
        "grows while kernels load. Tried: eager attention with dropout on scores, reentrant checkpointing, autocast.",
    ),
    (
        "peft method_comparison",
        "reserved p99",
        "The 99th percentile of what is reserved after a step, the cache emptied every 10 steps, where most batches "
        "are far shorter than the 768 tokens that are estimated: an upper bound. The lengths are not published.",
    ),
    (
        "ms-swift",
        "reserved",
        "Samples of varying, unpublished length fragment the cache over the run, and the models' own code of 2024 "
        "(Qwen, ChatGLM, Baichuan) casts and fuses by itself. Tried: one full batch of the longest sample.",
    ),
    (
        "fms-acceleration",
        "nvidia-smi",
        "A reading once a second of the whole card, less what it showed before: context, libraries and Triton's "
        "kernels included, and reserved memory of a run whose loading is not published.",
    ),
    ("Qwen README", "step time", "The model's own code with fused kernels and DeepSpeed, which is not traced."),
    (
        "optimum-benchmark",
        "step time",
        "Steps of milliseconds: the host's speed, which is not published, bounds them. Tried: host and device as two "
        "clocks, with the overhead of a measured server, which halves the worst miss.",
    ),
    ("transformers docs, BERT", "step time", "Kernels of torch 1.10 on a V100; total time with start-up, 512 samples."),
    (
        _T4,
        "step time",
        "The same settings ran 15 % faster in the other sweep (F0040 against F0062), and runs with less work took "
        "longer than their twins (F0013 against F0011): the card's clock, which is not published. Steps of "
        "SmolLM2-135M with 512 tokens are bound by a host about twice as slow as the one that the overhead was "
        "measured on. Tried: host and device as two clocks.",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One target and what was reached.

    Attributes:
        target: What has to hold.
        seen: What was seen.
        met: Whether it holds.
    """

    target: str
    seen: str
    met: bool


def check_targets(
    rows: Sequence[Mapping[str, Any]],
    unmapped: Sequence[UnmappedRow],
    summaries: Iterable[Summary],
    verdicts: Sequence[Verdicts],
    grades: Sequence[Grade],
) -> list[Check]:
    """Return every target that the rows can grade."""
    without = {item.row["id"] for item in unmapped}
    strict = [row for row in rows if grades_memory(row) and row["completeness"] == "A" and row["n_gpus"] == 1]
    checks = []
    if strict:
        share = sum(row["id"] not in without for row in strict) / len(strict)
        checks.append(_at_least("class A rows of one GPU that are mapped", share, MIN_MAPPED))
    false = sum(count.false_fits + count.contradicted_fits for count in verdicts)
    if verdicts:
        checks.append(Check("no run that failed, or does not fit, is said to fit", str(false), false == 0))
    clear = sum(count.clear for count in verdicts)
    if clear:
        called = sum(count.clear_called_fits for count in verdicts)
        checks.append(_at_least("finished runs with 10 % to spare that are said to fit", called / clear, MIN_CLEAR))
    times = [abs(grade.relative("step time")) for grade in grades if "step time" in grade.errors]
    if times:
        median = statistics.median(times)
        label = f"all sources, step time: median at most {STEP_TIME:.0%}"
        checks.append(Check(label, f"{median * 100:.1f} %", median <= STEP_TIME))
    for summary in summaries:
        bound = bound_of(summary)
        for name in ("median", "mean", "worst"):
            limit = None if bound is None else getattr(bound, name)
            if limit is not None:
                value = abs(getattr(summary, name))
                label = f"{summary.source}, {summary.counter}: {name} at most {limit:.0%}"
                checks.append(Check(label, f"{value * 100:.1f} %", value <= limit))
    return checks


def bound_of(summary: Summary) -> Bound | None:
    """Return the bound on a summary, the first that applies."""
    return next((bound for bound in BOUNDS if bound.applies(summary)), None)


def misses(grades: Iterable[Grade], summaries: Iterable[Summary]) -> list[tuple[str, str, float, str]]:
    """Return ``(row, counter, error, cause)`` of rows beyond the bound of their source where the source misses it."""
    limits: dict[tuple[str, str], float] = {}
    for summary in summaries:
        bound = bound_of(summary)
        if bound is None:
            continue
        pairs = [(summary.median, bound.median), (summary.mean, bound.mean), (abs(summary.worst), bound.worst)]
        if any(limit is not None and value > limit for value, limit in pairs):
            limits[(summary.source, summary.counter)] = min(limit for _, limit in pairs if limit is not None)
    found = []
    for grade in grades:
        source = source_name(grade.mapped.row)
        for counter in grade.errors:
            limit = limits.get((source, counter))
            if limit is not None and abs(grade.relative(counter)) > limit:
                found.append((str(grade.mapped.row["id"]), counter, grade.relative(counter), cause_of(source, counter)))
    return found


def cause_of(source: str, counter: str) -> str:
    """Return why rows of a source miss their bound; empty where nobody has said it."""
    return next((text for start, name, text in CAUSES if source.startswith(start) and name == counter), "")


def _at_least(label: str, share: float, limit: float) -> Check:
    return Check(f"{label}: at least {limit:.0%}", f"{share * 100:.0f} %", share >= limit)
