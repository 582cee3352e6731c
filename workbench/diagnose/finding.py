"""What a doctor says: one finding, with what was seen, where, how sure, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .causes import CAUSES


@dataclass(frozen=True)
class Fix:
    """One thing to do about a finding.

    Attributes:
        text: One sentence for a person.
        changes: Recipe fields that do it; empty when a person has to act.
        predicted_peak_bytes: Peak after the change, where the estimator knows.
        predicted_step_s: Seconds of a step after the change, where the estimator knows.
    """

    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    predicted_peak_bytes: int | None = None
    predicted_step_s: float | None = None


@dataclass(frozen=True)
class Finding:
    """One diagnosis.

    Attributes:
        kind: ``"leak"``, ``"oom"``, ``"nonfinite"``, ``"data"``, ``"speed"`` or another family of ``causes.py``.
        cause: Stable identifier from ``causes.CAUSES``, e.g. ``"leak.graph_total"``.
        summary: One sentence.
        where: Step, phase, module, file and line, object path, row, token: whatever is known.
        evidence: Numbers the verdict rests on.
        fixes: What to do, best first.
        confidence: 0 to 1.
        is_fault: False for a verdict that all is well.
    """

    kind: str
    cause: str
    summary: str
    where: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fixes: Sequence[Fix] = ()
    confidence: float = 1.0
    is_fault: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: one line of ``findings.jsonl``."""
        return asdict(self)

    def __str__(self) -> str:
        place = ", ".join(f"{name} {value}" for name, value in self.where.items() if value not in ("", None, ()))
        fix = f" {self.fixes[0].text}" if self.fixes else ""
        return f"[{self.cause}] {self.summary}" + (f" ({place})" if place else "") + fix


def make_finding(
    cause: str,
    summary: str,
    *,
    where: Mapping[str, Any] | None = None,
    evidence: Mapping[str, Any] | None = None,
    fixes: Sequence[Fix] = (),
    confidence: float = 0.9,
) -> Finding:
    """Return a finding of a listed cause; the family and, where none is given, the fix come from the table.

    Raises:
        KeyError: The cause is not in ``causes.CAUSES``.
    """
    known = CAUSES[cause]
    is_fault = known.kind != "memory"
    return Finding(
        kind=known.kind,
        cause=cause,
        summary=summary,
        where={name: value for name, value in (where or {}).items() if value not in ("", None)},
        evidence=dict(evidence or {}),
        fixes=tuple(fixes) or (Fix(known.remedy),),
        confidence=confidence,
        is_fault=is_fault,
    )


def render_findings(findings: Iterable[Finding]) -> str:
    """Return findings as text, faults first, one paragraph each."""
    ordered = sorted(findings, key=lambda finding: (not finding.is_fault, -finding.confidence))
    if not ordered:
        return "No fault found."
    lines = []
    for finding in ordered:
        lines.append(str(finding))
        lines += [f"    or: {fix.text}" for fix in finding.fixes[1:]]
    return "\n".join(lines)
