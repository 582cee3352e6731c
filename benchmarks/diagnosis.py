"""How often the doctors name the right cause: ``python -m benchmarks.diagnosis [--json] [--only A01,d15_] [--fast]``.

Every case of ``diagnosis_cases/cases.json`` that does not need CUDA is plain user code in a file of its own, run twice:
with its fault and as its healthy twin. The denominator is fixed: a case without a script counts as missed. Beside them
run the controls that only look like faults, and clean runs of 60 steps in different configurations.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.diagnosis_rivals import compare

FOLDER = Path(__file__).parent / "diagnosis_cases"
TIMEOUT_S = 150
NAMED_TARGET = 0.9


def run_script(path: str, healthy: bool) -> dict[str, Any]:
    """Run one script as a user would and return what the doctors said."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(FOLDER))
    namespace: dict[str, Any] = {"HEALTHY": healthy, "__name__": "__main__", "__file__": path}
    error = None
    started = time.perf_counter()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), namespace)
    except Exception as caught:
        error = f"{type(caught).__name__}: {str(caught).splitlines()[0] if str(caught) else ''}"
    found = collect(namespace)
    return {"findings": found, "error": error, "elapsed_s": round(time.perf_counter() - started, 2)}


def collect(namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the faults found in a script's variables ``w``, ``report`` and ``findings``."""
    findings = list(namespace.get("findings") or [])
    for name in ("w", "report"):
        findings += list(getattr(namespace.get(name), "findings", None) or [])
    return [
        {"cause": item.cause, "summary": item.summary, "where": {k: str(v) for k, v in item.where.items()}}
        for item in findings
        if item.is_fault
    ]


def run_clean(name: str) -> dict[str, Any]:
    """Run one healthy configuration for 60 steps."""
    import torch

    from benchmarks.diagnosis_clean import CONFIGURATIONS, run_configuration

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(FOLDER))
    started = time.perf_counter()
    watch = run_configuration(CONFIGURATIONS[name])
    return {
        "findings": collect({"w": watch}),
        "error": None,
        "verdict": watch.memory_verdict.cause if watch.memory_verdict is not None else "not suspected",
        "elapsed_s": round(time.perf_counter() - started, 2),
    }


def _child(function: Callable[..., Any], arguments: tuple[Any, ...], pipe: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        try:
            pipe.send(function(*arguments))
        except BaseException as error:
            pipe.send({"findings": [], "error": f"crashed: {type(error).__name__}: {error}", "elapsed_s": 0.0})
    os._exit(0)


def isolated(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Run a function in a forked child, so that no case sees what another left behind."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(function, arguments, sender))
    process.start()
    sender.close()
    answer: dict[str, Any] = {"findings": [], "error": "no answer in time", "elapsed_s": TIMEOUT_S}
    with contextlib.suppress(EOFError):
        if receiver.poll(TIMEOUT_S):
            answer = receiver.recv()
    if process.is_alive():
        process.terminate()
    process.join()
    return answer


def judge(case: dict[str, Any], result: dict[str, Any]) -> str:
    """Return ``"named"``, ``"wrong cause"`` or ``"missed"`` for a faulty run."""
    causes = [finding["cause"] for finding in result["findings"]]
    if case["cause"] not in causes:
        return "wrong cause" if causes else "missed"
    texts = [f"{f['summary']} {f['where']}" for f in result["findings"] if f["cause"] == case["cause"]]
    return "named" if any(case.get("names", "") in text for text in texts) else "wrong cause"


# Findings that only name what a variable of the script holds on purpose are no alarm in a healthy twin.
HOLDERS = frozenset({"release.variable", "release.optimizer", "release.trainer"})


def false_alarms(result: dict[str, Any], cause: str | None) -> list[str]:
    """Return the causes reported for a healthy run."""
    return [f["cause"] for f in result["findings"] if f["cause"] == cause or f["cause"] not in HOLDERS]


def main() -> int:
    """Run everything and print the table; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="comma-separated ids or beginnings of script names")
    parser.add_argument("--fast", action="store_true", help="leave out the clean runs")
    parser.add_argument("--compare", action="store_true", help="also run the usual tools, with --only or --fast too")
    options = parser.parse_args()
    only = [word for word in options.only.split(",") if word]

    import peft  # noqa: F401  # loaded once, before the children are forked
    import torch
    import transformers  # noqa: F401
    from transformers import Trainer  # noqa: F401

    import workbench

    torch.set_num_threads(1)
    getattr(workbench, "watch"), getattr(workbench, "check"), getattr(workbench, "release")  # noqa: B009
    lists = ("cases.json", "held_out/held_out.json")
    cases = [case for name in lists for case in json.loads((FOLDER / name).read_text(encoding="utf-8"))]
    cases = [c for c in cases if not only or c["id"] in only or any((c["script"] or "-").startswith(w) for w in only)]
    report: dict[str, Any] = {"cases": [], "held_out": [], "controls": [], "clean": [], "rivals": []}
    for case in cases:
        if case["false_alarm"]:
            result = isolated(run_script, str(FOLDER / f"{case['script']}.py"), False)
            alarms = false_alarms(result, None) + ([result["error"]] if result["error"] else [])
            report["controls"].append({"id": case["id"], "alarms": alarms})
            _tell(options, case["id"], "control", alarms, result)
        elif not case["needs_cuda"]:
            report["held_out" if case["script"] and "/" in case["script"] else "cases"].append(_run_case(case, options))
            if case["script"] and (options.compare or not (options.fast or only)):
                report["rivals"] += compare(case, isolated)
    if not options.fast and not only:
        from benchmarks.diagnosis_clean import CONFIGURATIONS

        for name in CONFIGURATIONS:
            result = isolated(run_clean, name)
            alarms = false_alarms(result, None) + ([result["error"]] if result["error"] else [])
            report["clean"].append({"name": name, "alarms": alarms, "verdict": result.get("verdict")})
            _tell(options, name, f"clean ({result.get('verdict')})", alarms, result)
    return _summary(report, options)


def _run_case(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    row = {"id": case["id"], "expected": case["cause"]}
    if not case["script"]:
        return row | {"outcome": "missed", "reason": case.get("reason", "not reproduced"), "twin_alarms": []}
    path = str(FOLDER / f"{case['script']}.py")
    result, twin = isolated(run_script, path, False), isolated(run_script, path, True)
    outcome = judge(case, result)
    alarms = false_alarms(twin, case["cause"]) + ([twin["error"]] if twin["error"] else [])
    _tell(options, case["id"], outcome, alarms, result)
    found = [f["cause"] for f in result["findings"]]
    return row | {"outcome": outcome, "found": found, "twin_alarms": alarms}


def _tell(options: argparse.Namespace, name: str, outcome: str, alarms: list[str], result: dict[str, Any]) -> None:
    if options.json:
        return
    print(
        f"{name:28} {outcome:12} {result['elapsed_s']:6} s  {'FALSE ALARM ' + str(alarms) if alarms else ''}",
        flush=True,
    )
    if outcome in ("missed", "wrong cause") or options.only:
        print(f"    error: {result['error']}")
        for finding in result["findings"]:
            print(f"    {finding['cause']}: {finding['summary']} {finding['where']}")


def _summary(report: dict[str, Any], options: argparse.Namespace) -> int:
    cases = report["cases"]
    count = {name: sum(row["outcome"] == name for row in cases) for name in ("named", "wrong cause", "missed")}
    alarms = {
        "twins": sum(bool(row["twin_alarms"]) for row in cases),
        "controls": sum(bool(row["alarms"]) for row in report["controls"]),
        "clean": sum(bool(row["alarms"]) for row in report["clean"]),
    }
    report["summary"] = {"denominator": len(cases), **count, "false_alarms": alarms}
    held_out = report["held_out"]
    report["summary"]["held_out"] = {
        "denominator": len(held_out),
        "named": sum(row["outcome"] == "named" for row in held_out),
        "twin_alarms": sum(bool(row["twin_alarms"]) for row in held_out),
    }
    report["summary"]["rivals"] = _rivals(report)
    share = count["named"] / max(1, len(cases))
    if options.json:
        print(json.dumps(report))
    else:
        named = f"named right {count['named']} of {len(cases)} ({100 * share:.0f} %)"
        for tool, row in report["summary"]["rivals"].items():
            print(f"{tool}: {row}")
        print(f"held out: {report['summary']['held_out']}")
        print(f"{named}, wrong cause {count['wrong cause']}, missed {count['missed']}; false alarms: {alarms}")
    return 0 if share >= NAMED_TARGET and not any(alarms.values()) else 1


def _rivals(report: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return per tool: cases it applies to, alarms on faults and on twins, and how many of them the doctors named."""
    named = {row["id"] for row in report["cases"] + report["held_out"] if row["outcome"] == "named"}
    table: dict[str, dict[str, int]] = {}
    for row in report["rivals"]:
        counts = table.setdefault(row["tool"], {"cases": 0, "alarms": 0, "twin_alarms": 0, "named_by_workbench": 0})
        counts["cases"] += 1
        counts["alarms"] += row["alarm"]
        counts["twin_alarms"] += row["twin_alarm"]
        counts["named_by_workbench"] += row["id"] in named
    return table


if __name__ == "__main__":
    sys.exit(main())
