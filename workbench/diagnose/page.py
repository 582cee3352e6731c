"""The page of findings, made from the list of causes: ``python -m workbench.diagnose.page > docs/findings.md``."""

from __future__ import annotations

import sys

from .causes import CAUSES

_FAMILIES = {
    "leak": "Memory that grows",
    "memory": "Verdicts that all is well with memory",
    "release": "Memory that is not given back",
    "oom": "Out of memory",
    "nonfinite": "NaN and Inf",
    "loss": "The course of the loss",
    "data": "Rows and tokens",
    "model": "Model and optimizer",
    "save": "Saving",
    "resume": "Resuming",
    "training": "The loop",
    "speed": "Speed",
    "error": "Other errors",
}

_HEAD = """# Findings

Every doctor (`workbench.watch`, `workbench.check`, `workbench.release` and the panel's own runs) answers with findings.
A finding has a `cause` from this list, a one-sentence `summary`, `where` (step, phase, module, operator, file and line,
object path, row, token), `evidence` (numbers), `fixes` and a `confidence`. This page is made from
`workbench/diagnose/causes.py`.

```python
with workbench.watch(model, optimizer) as w:
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
print(w.report())
```
"""


def render_page() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD.rstrip()]
    for family, title in _FAMILIES.items():
        lines += ["", f"## {title}", "", "| Cause | What is wrong | What usually mends it |", "|---|---|---|"]
        lines += [f"| `{c.id}` | {c.title} | {c.remedy} |" for c in CAUSES.values() if c.kind == family]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_page())
