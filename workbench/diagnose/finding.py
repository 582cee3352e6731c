"""What a doctor says: one finding, with what was seen, where, how sure, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fix:
    """One thing to do about a finding.

    Attributes:
        text: One sentence for a person.
        changes: Recipe fields that do it; empty when a person has to act.
    """

    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One diagnosis.

    Attributes:
        kind: ``"leak"``, ``"oom"``, ``"nonfinite"``, ``"data"``, ``"speed"`` or ``"error"``.
        cause: Stable identifier, e.g. ``"leak.steady_growth"``.
        summary: One sentence.
        where: Step, phase, module, file and line: whatever is known.
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
