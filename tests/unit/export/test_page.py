"""The report page: everything inside, nothing to fetch, names as text only."""

from __future__ import annotations

import json
import re
from pathlib import Path

from workbench.export import export_run
from workbench.recipe import Recipe

GRADE = {
    "num_bytes": 2**20, "merged_num_bytes": 2**22, "compression": 4.0, "perplexity": 11.0, "merged_perplexity": 10.0,
    "accuracy_fraction": 0.5, "merged_accuracy_fraction": 0.6, "mean_logit_difference": 0.01, "logit_std": 1.0,
    "same_next_token_fraction": 0.97, "tokens_per_s": 500.0, "merged_tokens_per_s": 1000.0, "reader": "somebody",
}  # fmt: skip


def make_run(folder: Path, recipe: Recipe) -> Path:
    (folder / "exports" / "gguf-q4_0").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    rows = [{"step": step, "loss": 3 / step, "learning_rate": 1e-4, "tokens_per_s": 100.0} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "exports" / "gguf-q4_0" / "export.json").write_text(json.dumps({"format": "gguf-q4_0", "grade": GRADE}))
    finding = {"cause": "leak", "summary": "<b>Grows</b>"}
    (folder / "findings.jsonl").write_text(json.dumps(finding) + '\n{"kind": "half')
    return folder


def test_the_page_holds_curves_findings_and_grades_and_opens_offline(tmp_path: Path) -> None:
    report = export_run(make_run(tmp_path / "run", Recipe()), "report")
    page = (report.path / "report.html").read_text()
    assert page.count("<svg") == 3 and all(f"{title}</" in page for title in ("Loss", "Learning rate", "Speed"))
    assert "11.000 (+10.00%)" in page and "50.0% (-10.0 points)" in page and "500 (0.50x)" in page
    assert "&lt;b&gt;Grows&lt;/b&gt;" in page and "<b>Grows" not in page
    # Namespaces of SVG are names, not addresses; nothing else may point outside.
    outside = re.findall(r"(?:src|href)=|url\(|@import|<script|<link", page)
    assert not outside and set(re.findall(r"https?://[^\s\"\'<]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_names_stay_text(tmp_path: Path) -> None:
    recipe = Recipe().with_changes({"model.name_or_path": "<img src=x onerror=alert(1)>"})
    page = (export_run(make_run(tmp_path / "run", recipe), "report").path / "report.html").read_text()
    assert "<img" not in page and "&lt;img" in page
