"""One list of causes: findings, the benchmark's cases and the docs page all use it."""

import ast
import json
from pathlib import Path

import pytest

import workbench
from workbench.diagnose.causes import CAUSES
from workbench.diagnose.finding import make_finding
from workbench.diagnose.page import render_page

ROOT = Path(workbench.__file__).parents[1]
FAMILIES = {"leak", "memory", "release", "oom", "nonfinite", "loss", "data", "model", "save", "resume", "training",
            "speed", "error"}  # fmt: skip


def named_in_code() -> set[str]:
    found = set()
    for path in (ROOT / "workbench").rglob("*.py"):
        if path.name in ("causes.py", "page.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(".")[0] in FAMILIES:
                family, _, name = node.value.partition(".")
                if name.replace("_", "").isalnum() and name.islower() and family in FAMILIES:
                    found.add(node.value)
    return {text for text in found if text in CAUSES or text.split(".")[0] in ("leak", "oom", "nonfinite", "release")}


def test_every_cause_in_the_code_is_in_the_list() -> None:
    assert named_in_code() <= set(CAUSES)


def test_every_case_has_a_cause_of_the_list_and_a_source() -> None:
    cases = json.loads((ROOT / "benchmarks/diagnosis_cases/cases.json").read_text(encoding="utf-8"))
    assert len(cases) == 96
    for case in cases:
        assert case["url"].startswith("https://")
        assert case["cause"] in CAUSES or case["false_alarm"]
        if case["script"]:
            assert (ROOT / f"benchmarks/diagnosis_cases/{case['script']}.py").exists()


def test_a_finding_takes_family_and_fix_from_the_list() -> None:
    finding = make_finding("leak.graph_total", "text")
    assert (finding.kind, finding.fixes[0].text) == ("leak", CAUSES["leak.graph_total"].remedy)
    assert not make_finding("memory.clean", "text").is_fault
    with pytest.raises(KeyError):
        make_finding("leak.no_such", "text")


def test_the_docs_page_is_the_one_made_from_the_code() -> None:
    page = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    assert page == render_page(), "run: python -m workbench.diagnose.page > docs/findings.md"
    assert all(f"`{cause}`" in page for cause in CAUSES)
