"""HTML of findings: what was found and where, and the bill at a failure against the prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..events import MEMORY_CATEGORIES
from ..units import format_bytes

_WORDS = {"op": "operator", "node": "autograd node"}
_SHOWN = (
    "phase",
    "step",
    "module",
    "op",
    "node",
    "line",
    "object",
    "parameter",
    "row",
    "batch_row",
    "token_id",
    "path",
)


def render_finding(finding: Mapping[str, Any]) -> str:
    """Return one finding as an alert: its sentence, its place, and the bill where there is one.

    Args:
        finding: ``Finding.to_dict()``, or a line of ``findings.jsonl``.
    """
    place = finding.get("where", {})
    words = [f"{_WORDS.get(name, name.replace('_', ' '))} {place[name]}" for name in _SHOWN if name in place]
    where = f'<div class="wb-where">{escape(" · ".join(words))}</div>' if words else ""
    facts = finding.get("evidence", {}).get("new_facts", ())
    new = f"<div>New here: {escape('; '.join(map(str, facts)))}.</div>" if facts else ""
    texts = [str(fix.get("text", "")) for fix in finding.get("fixes", ()) if not fix.get("changes")]
    todo = f"<div>{escape(' '.join(texts[:2]))}</div>" if texts else ""
    return (
        f'<div class="wb-note wb-note-warn" role="alert"><b>{escape(str(finding.get("summary", "")))}</b>'
        f"{where}{new}{render_bill(finding.get('evidence', {}))}{todo}</div>"
    )


def render_bill(evidence: Mapping[str, Any]) -> str:
    """Return the bill at a failure beside the predicted one, as a table; empty where there is none."""
    rows = []
    for name in MEMORY_CATEGORIES:
        seen, predicted = evidence.get(f"{name}_bytes"), evidence.get(f"predicted_{name}_bytes")
        if seen or predicted:
            rows.append((name.replace("_", " "), seen, predicted))
    if not any(seen for _, seen, _ in rows):
        return ""
    rows.append(("asked for", evidence.get("requested_bytes"), None))
    rows.append(("in all", evidence.get("needed_bytes"), evidence.get("predicted_bytes")))
    rows.append(("device", evidence.get("limit_bytes"), evidence.get("limit_bytes")))
    body = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{_bytes(seen)}</td><td>{_bytes(predicted)}</td></tr>"
        for name, seen, predicted in rows
    )
    return (
        '<table class="wb-table wb-bill"><thead><tr><th scope="col">Memory</th><th scope="col">at the failure</th>'
        f'<th scope="col">predicted peak</th></tr></thead><tbody>{body}</tbody></table>'
    )


def render_findings_list(findings: Sequence[Mapping[str, Any]], all_well: str) -> str:
    """Return findings one below the other, or a sentence that all is well."""
    if not findings:
        return f'<div class="wb-note wb-note-good" role="status">{escape(all_well)}</div>'
    return "".join(render_finding(finding) for finding in findings)


def _bytes(value: Any) -> str:
    return escape(format_bytes(value)) if value else ""
