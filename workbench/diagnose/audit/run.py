"""Audits of what was saved and of what a resumed run continues with."""

from __future__ import annotations

import json
from pathlib import Path

from ..finding import Finding, make_finding
from .subject import Subject, register


@register
def adapter_was_saved(subject: Subject) -> Finding | None:
    """The file of an adapter must hold each of its tensors, with equal values."""
    if subject.saved_folder is None or subject.model is None:
        return None
    expected = {name for name, _ in subject.model.named_parameters() if "lora_" in name or "modules_to_save" in name}
    path = Path(subject.saved_folder) / "adapter_model.safetensors"
    if not expected or not path.exists():
        return None
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        saved = list(file.keys())
    if len(saved) >= len(expected):
        return None
    size = path.stat().st_size
    return make_finding(
        "save.adapter_empty",
        f"The saved adapter has {len(saved)} tensors, expected {len(expected)} ({size} bytes). The "
        f"model in memory still "
        "has the weights: save again now.",
        where={"path": str(path)},
        evidence={"num_saved": len(saved), "num_expected": len(expected), "file_bytes": size},
        confidence=1.0,
    )


@register
def cache_is_on(subject: Subject) -> Finding | None:
    """A model saved for generation should use its cache."""
    if subject.saved_folder is None:
        return None
    for name in ("generation_config.json", "config.json"):
        path = Path(subject.saved_folder) / name
        if path.exists() and json.loads(path.read_text(encoding="utf-8")).get("use_cache") is False:
            return make_finding(
                "speed.use_cache_off",
                f"use_cache is False in the saved {name}: generation computes the whole prefix again for every token.",
                where={"path": str(path)},
                confidence=0.95,
            )
    return None


@register
def state_came_back(subject: Subject) -> Finding | None:
    """A run that continues needs its moments and its place in the schedule."""
    step = subject.resumed_step
    if not step:
        return None
    missing = []
    if subject.optimizer is not None and not subject.optimizer.state:
        missing.append("the optimizer's moments")
    last = getattr(subject.scheduler, "last_epoch", None)
    if last is not None and last < step:
        missing.append(f"the schedule (at step {last})")
    if not missing:
        return None
    return make_finding(
        "resume.optimizer_missing",
        f"The run continues from step {step} without {' and '.join(missing)}.",
        where={"step": step},
        evidence={"schedule_step": last},
        confidence=0.95,
    )
