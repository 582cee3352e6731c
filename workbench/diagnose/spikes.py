"""What spikes of the loss have in common: the rows that were there each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .finding import Finding, Fix, make_finding

# One step that stands out is chance, and two may be; the third is worth a look at the rows.
MIN_SPIKES = 3
NAMED_ROWS = 5


def find_spikes(spikes: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Return a finding where the loss of single steps stood out again and again.

    Args:
        spikes: Data of the run's ``"spike"`` events, in order.
    """
    if len(spikes) < MIN_SPIKES:
        return None
    highest = max(spikes, key=lambda spike: float(spike["loss"]) / max(abs(float(spike["limit"])), 1e-12))
    counts = Counter(row for spike in spikes for row in set(spike["rows"]))
    repeated = [row for row, count in counts.most_common() if count > 1]
    # Where no sample came twice, those of the highest spike are the first to look at.
    rows = repeated or list(highest["rows"])
    texts = _texts(spikes)
    named = ", ".join(f"{row} ({texts[row]!r})" if texts.get(row) else str(row) for row in rows[:NAMED_ROWS])
    more = f" and {len(rows) - NAMED_ROWS} more" if len(rows) > NAMED_ROWS else ""
    why = "were in several of them" if repeated else "were in the highest"
    fixes = [Fix("Look at the training samples it names, and take damaged ones out of the data.")]
    if highest["policy"] == "keep":
        fixes.append(Fix("Leave the updates of such steps out.", {"policies.on_spike": "skip"}))
    return make_finding(
        "loss.spikes",
        f"The loss of {len(spikes)} steps stood out of the steps before, highest in step {highest['step']} "
        f"({highest['loss']:.4g} against a median of {highest['median']:.4g}). Training samples {named}{more} {why}.",
        where={"step": int(highest["step"]), "rows": rows[:NAMED_ROWS]},
        evidence={
            "num_spikes": len(spikes),
            "steps": [int(spike["step"]) for spike in spikes],
            "num_rows_in_several": len(repeated),
            "num_skipped": sum(spike["policy"] == "skip" for spike in spikes),
        },
        fixes=fixes,
        confidence=0.8 if repeated else 0.6,
    )


def _texts(spikes: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return how rows begin, as far as the events say: they hold the texts of their first rows only."""
    return {row: text for spike in spikes for row, text in zip(spike["rows"], spike["texts"], strict=False)}
