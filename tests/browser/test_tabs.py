"""The panel's tabs in a real JupyterLab: runs, their comparison, export and chat, as a person uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from playwright.sync_api import expect

from .lab import Lab, Notebook
from .test_workbench import PANEL, panel_cell, write_rows

SHORT = {
    "model.name_or_path": "tiny-llama",
    "data.name_or_path": "rows.jsonl",
    "data.max_length": 64,
    "training.max_steps": 4,
    "evaluation.split": "none",
}
TWO_RUNS = """
panel.wait_for_estimate(); panel.start(); panel.wait()
panel.change({"training.learning_rate": 3e-3, "adapter.r": 4})
panel.wait_for_estimate(); panel.start(); panel.wait()
panel"""


def open_tab(page: Any, name: str) -> None:
    page.locator(PANEL).get_by_role("tab", name=name, exact=True).click()


def test_runs_are_compared_renamed_and_deleted(
    notebook: Callable[..., Notebook], lab: Lab, page: Any, shoot: Callable[..., None]
) -> None:
    write_rows(lab.work, "rows.jsonl", rows=24)
    notebook(panel_cell(SHORT, TWO_RUNS)).run_all()
    page.locator(PANEL).wait_for()
    open_tab(page, "Runs")
    rows = page.locator(".wb-runs-rows .wb-runs-row")
    expect(rows).to_have_count(2, timeout=30_000)
    expect(rows.first).to_contain_text("done")
    for row in rows.all():
        row.get_by_role("checkbox").check()
    shoot(page, "30-runs", PANEL)
