"""What each technique changes on a reference run, and what the plan the workbench proposes gains over a plain one.

``python -m benchmarks.techniques [--json] [--only TEXT] [--part all|rows|plan] [--store [--missing]]``; ``--page``
prints ``docs/techniques.md`` from what ``--store`` kept.

Every run is a real one of ``smollm2-135m-instruct`` on ``python-docs`` on one thread of this CPU, on an emulated T4:
memory is the peak of its simulated allocator, seconds are the process's own (another program does not lengthen them),
per supervised token, over the steps after the first two; the loss is that of the held-out rows at the end. A row's run
differs from its base by the technique alone. Where the product refuses a technique here, its own sentence stands in
place of figures.

The plan's part: every row padded to ``max_length``, float32, AdamW, no checkpointing, against the fastest settings that
``find_settings`` proposes within 60 % of that memory without altering what is learned; with and without the padding,
and with each of its changes alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.techniques_rows import TECHNIQUES, Technique
from workbench.errors import WorkbenchError
from workbench.events import Event
from workbench.recipe import Recipe

WARM_STEPS = 2
REFERENCE: dict[str, Any] = {
    "model.name_or_path": "smollm2-135m-instruct",
    "model.dtype": "float32",
    "data.max_length": 64,
    "data.max_rows": 60,
    "training.per_device_train_batch_size": 2,
    "training.gradient_accumulation_steps": 1,
    "training.learning_rate": 1e-3,
    "training.max_steps": 5,
    "training.mixed_precision": "no",
    "training.save_steps": 0,
    "evaluation.max_rows": 6,
    "evaluation.eval_steps": 0,
    "hardware.device": "cpu",
    "hardware.emulate": "Tesla T4",
}
BASES: dict[str, dict[str, Any]] = {
    "adapter": {},
    "full": {"adapter.method": "none", "training.learning_rate": 2e-5},
    "padded": {"data.padding": "max_length"},
    "classifier": {"model.task": "sequence-classification", "data.name_or_path": "{folder}/classes.jsonl"},
}
BASE_NAMES = {
    "adapter": "LoRA",
    "full": "every weight trains",
    "padded": "LoRA, padded to max_length",
    "classifier": "LoRA, classifier",
}
STORED = Path(__file__).parent / "data" / "techniques.json"
# The plan's part.
PLAN_LENGTH, PLAN_BATCH, PLAN_STEPS = 256, 4, 4
MEMORY_SHARE = 0.6
# The tutorials claim 40 % less memory and 2.3 times the speed.
MAX_MEMORY, MIN_SPEED, MAX_LOSS_CHANGE = 0.6, 2.3, 0.01


@dataclass(frozen=True)
class Figures:
    """What one run took.

    Attributes:
        peak_bytes: Highest allocated bytes of the emulated card.
        seconds_per_token: Process seconds per supervised token.
        eval_loss: Loss of the held-out rows at the end.
        num_tokens: Supervised tokens of the counted steps.
        refused: The product's sentence where it refused; the figures are NaN then.
    """

    peak_bytes: float = math.nan
    seconds_per_token: float = math.nan
    eval_loss: float = math.nan
    num_tokens: int = 0
    refused: str = ""


class _Steps:
    """An Observer that notes the process's clock, memory and supervised tokens at the end of each step."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.tokens: list[float] = []
        self.peaks: list[float] = []

    def on_event(self, event: Event) -> None:
        if event.kind != "step":
            return
        self.clock.append(time.process_time())
        self.tokens.append(float(event.data["num_supervised_tokens"]))
        peak = event.data.get("peak_allocated_bytes")
        self.peaks.append(math.nan if peak is None else float(peak))

    def seconds_per_token(self) -> tuple[float, int]:
        first = min(WARM_STEPS, len(self.clock) - 1)
        tokens = sum(self.tokens[first:])
        return (self.clock[-1] - self.clock[first - 1]) / tokens, int(tokens)


def run(changes: Mapping[str, Any], folder: Path) -> Figures:
    """Train the reference run with ``changes`` and return what it took."""
    from workbench.pipeline import release, start_session

    seen = _Steps()
    with tempfile.TemporaryDirectory(dir=folder) as run_root:
        try:
            recipe = Recipe().with_changes(_filled({**REFERENCE, **changes}, folder))
            session = start_session(recipe, run_dir=Path(run_root) / "run", observers=[seen]).wait()
        except WorkbenchError as error:
            return Figures(refused=" ".join(str(error).split()))
        if session.state != "done":
            return Figures(refused=" ".join(session.failure_text().split()))
        loss = session.history.last("eval_loss")
        del session
        release()
        gc.collect()
    seconds, tokens = seen.seconds_per_token()
    return Figures(max(seen.peaks), seconds, math.nan if loss is None else float(loss), tokens)


def _filled(changes: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("{folder}", str(folder))
        return tuple(fill(item) for item in value) if isinstance(value, tuple) else value

    return {path: fill(value) for path, value in changes.items()}


def write_data(folder: Path) -> None:
    """Write the files that some techniques read: two tasks, and rows with classes of unlike size."""
    from workbench.components import python_docs

    rows = [json.loads(line) for line in python_docs.prepare().read_text(encoding="utf-8").splitlines()[:240]]
    for name, part in (("first", rows[:120]), ("second", rows[120:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    with (folder / "classes.jsonl").open("w", encoding="utf-8") as file:
        for row in rows:
            text = row["messages"][-1]["content"]
            file.write(json.dumps({"text": text, "label": "long" if len(text) > 400 else "short"}) + "\n")


def measure_rows(
    folder: Path, only: str = "", keep: Callable[[dict[str, Any]], None] | None = None, *, missing: bool = False
) -> list[Any]:
    """Run each technique beside its base.

    Args:
        folder: For files and run folders.
        only: Part of the group or name of those that are run.
        keep: Is handed each row at once.
        missing: Leave those out that ``--store`` has kept.

    Returns:
        One dict a row.
    """
    bases: dict[str, Figures] = {}
    rows = []
    known = {(row["group"], row["name"]) for row in read_stored()["rows"]} if missing else set()
    for technique in TECHNIQUES:
        if only.lower() not in f"{technique.group} {technique.name}".lower():
            continue
        if (technique.group, technique.name) in known:
            continue
        changes = {**BASES[technique.base], **technique.also}
        key = f"{technique.base} {technique.also}"
        if key not in bases:
            bases[key] = run(changes, folder)
        figures = run({**changes, **technique.changes}, folder)
        rows.append({**_row(technique), "base_figures": asdict(bases[key]), "figures": asdict(figures)})
        if keep is not None:
            keep(rows[-1])
        print(f"{technique.group}: {technique.name}: {_effects(rows[-1])}", file=sys.stderr)
    return rows


def _row(technique: Technique) -> dict[str, Any]:
    return {"group": technique.group, "name": technique.name, "changes": technique.changes, "base": technique.base}


def _effects(row: Mapping[str, Any]) -> str:
    base, figures = Figures(**row["base_figures"]), Figures(**row["figures"])
    if figures.refused or base.refused:
        return figures.refused or base.refused
    return (
        f"memory x{figures.peak_bytes / base.peak_bytes:.2f}, "
        f"time x{figures.seconds_per_token / base.seconds_per_token:.2f}, "
        f"loss {figures.eval_loss - base.eval_loss:+.3f}"
    )


def measure_plan(folder: Path) -> dict[str, Any]:
    """Run the padded baseline, what the plan proposes, and its changes one by one."""
    from workbench.components.data import prepare_data
    from workbench.components.source import find_source
    from workbench.components.tokenizer import load_tokenizer
    from workbench.estimate import shape_of_data
    from workbench.hardware import read_device
    from workbench.plan import find_settings

    plain = {
        "data.max_length": PLAN_LENGTH,
        "training.per_device_train_batch_size": PLAN_BATCH,
        "training.max_steps": PLAN_STEPS,
    }
    padded = {**plain, "data.padding": "max_length"}
    recipe = Recipe().with_changes({**REFERENCE, **padded, "hardware.emulate": None})
    prepared = prepare_data(recipe, load_tokenizer(find_source(recipe, for_training=False)))
    shape = shape_of_data(recipe, prepared)
    front = find_settings(
        recipe, read_device("cpu"), shape=shape, pinned=("training.optim",), freedom="nothing", budget=60
    )
    most = MEMORY_SHARE * front.current.process_bytes
    chosen = next((option for option in front.options if option.process_bytes <= most), None)
    if chosen is None:
        raise SystemExit(f"No proposed settings take at most {MEMORY_SHARE:.0%} of the memory.")
    proposed = dict(chosen.changes)
    without = {path: value for path, value in proposed.items() if path != "data.padding"}
    variants = {"baseline": {}, "plan": proposed, "plan, padding left": without}
    split = [path for path in proposed if path.startswith("training.") and path.endswith(("batch_size", "steps"))]
    alone = [tuple(split)] if split else []
    alone += [(path,) for path in proposed if path not in split]
    for paths in alone if len(alone) > 1 else []:
        variants[" and ".join(paths) + " alone"] = {path: proposed[path] for path in paths}
    results = {name: run({**padded, **changes}, folder) for name, changes in variants.items()}
    base = results["baseline"]
    rows = {
        name: {
            "changes": variants[name],
            "memory_ratio": one.peak_bytes / base.peak_bytes,
            "speed_ratio": base.seconds_per_token / one.seconds_per_token,
            "loss_change": one.eval_loss / base.eval_loss - 1,
            **asdict(one),
        }
        for name, one in results.items()
    }
    plan = rows["plan"]
    met = {
        f"memory at most {MAX_MEMORY:.0%}": plan["memory_ratio"] <= MAX_MEMORY,
        f"at least {MIN_SPEED} times the speed": plan["speed_ratio"] >= MIN_SPEED,
        f"held-out loss within {MAX_LOSS_CHANGE:.0%}": abs(plan["loss_change"]) <= MAX_LOSS_CHANGE,
    }
    padding_share = 1 - shape.mean_real_tokens / shape.mean_length
    return {"rows": rows, "targets": met, "padding_share": padding_share, "num_estimates": front.num_estimates}


def render_plan(plan: Mapping[str, Any]) -> str:
    """Return the plan's table as Markdown."""
    lines = ["| run | changes | memory | speed | held-out loss |", "| --- | --- | --- | --- | --- |"]
    for name, row in plan["rows"].items():
        changes = ", ".join(f"`{path}={value}`" for path, value in row["changes"].items()) or "none"
        if row["refused"]:
            lines.append(f"| {name} | {changes} | {row['refused']} | | |")
            continue
        lines.append(
            f"| {name} | {changes} | {row['peak_bytes'] / 2**20:.0f} MiB, x{row['memory_ratio']:.2f} "
            f"| x{row['speed_ratio']:.2f} | {row['eval_loss']:.4f} ({row['loss_change']:+.2%}) |"
        )
    targets = "; ".join(f"{target}: {'met' if met else 'MISSED'}" for target, met in plan["targets"].items())
    return "\n".join([*lines, "", f"{plan['padding_share']:.0%} of the baseline's tokens are padding. {targets}."])


def render_page(rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> str:
    """Return ``docs/techniques.md``.

    Args:
        rows: From ``measure_rows``, in any order.
        plan: From ``measure_plan``.
    """
    known = {(row["group"], row["name"]): row for row in rows}
    rows = [known[key] for item in TECHNIQUES if (key := (item.group, item.name)) in known]
    lines = [
        "# Techniques",
        "",
        "Printed by `python -m benchmarks.techniques --page` from what `--store` measured; not edited by hand.",
        *(line.strip() for line in (__doc__ or "").split("\n\n")[2].splitlines()),
        "",
    ]
    texts = {(technique.group, technique.name): technique for technique in TECHNIQUES}
    group = None
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            lines += [f"## {group}", "", "| technique | switched on by | what it does | what it costs | when not |"
                      " against | on the reference run |", "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
        text = texts[(row["group"], row["name"])]
        fields = ", ".join(f"`{path}={_plain(value)}`" for path, value in row["changes"].items())
        cells = (row["name"], fields, text.does, text.costs, text.avoid, BASE_NAMES[row["base"]], _effects(row))
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
        if rows[-1] is row or rows[rows.index(row) + 1]["group"] != group:
            lines.append("")
    lines += ["## The proposed plan against a plain run", "", render_plan(plan)]
    return "\n".join(lines) + "\n"


def read_stored() -> dict[str, Any]:
    """Return what ``--store`` kept: ``rows`` and ``plan``."""
    return json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {"rows": [], "plan": {}}


def _keep_row(row: Mapping[str, Any]) -> None:
    stored = read_stored()
    others = [one for one in stored["rows"] if (one["group"], one["name"]) != (row["group"], row["name"])]
    _write_stored({**stored, "rows": [*others, row]})


def _write_stored(stored: Mapping[str, Any]) -> None:
    STORED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)).replace("{folder}/", "")
    return str(value).replace("{folder}/", "/mnt/")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 when a target is missed."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="part of a technique's group or name")
    parser.add_argument("--part", choices=("all", "rows", "plan"), default="all")
    parser.add_argument("--store", action="store_true", help="keep the figures for the page")
    parser.add_argument("--missing", action="store_true", help="run only techniques that have no figures yet")
    parser.add_argument("--page", action="store_true", help="print the page from the kept figures")
    options = parser.parse_args(argv)
    if options.page:
        stored = read_stored()
        print(render_page(stored["rows"], stored["plan"]), end="")
        return 0
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    plan: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        if options.part != "plan":
            keep = _keep_row if options.store else None
            rows = measure_rows(folder, options.only, keep, missing=options.missing)
        if options.part != "rows":
            plan = measure_plan(folder)
    if options.store and plan:
        _write_stored({**read_stored(), "plan": plan})
    if options.json:
        print(json.dumps({"rows": rows, "plan": plan}, indent=1))
    else:
        for row in rows:
            print(f"{row['group']:<26}{row['name']:<36}{_effects(row)}")
        if plan:
            print(render_plan(plan))
    return 0 if not plan or all(plan["targets"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
