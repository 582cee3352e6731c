"""The panel's tabs in a real JupyterLab: runs, their comparison, export and chat, as a person uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from playwright.sync_api import expect

from .lab import Lab, Notebook
from .test_workbench import PANEL, panel_cell, press, write_rows

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
    notebook(panel_cell(SHORT, TWO_RUNS, ', run_root="compared"')).run_all()
    page.locator(PANEL).wait_for()
    open_tab(page, "Runs")
    rows = page.locator(".wb-runs-rows .wb-runs-row")
    expect(rows).to_have_count(2, timeout=30_000)
    expect(rows.first).to_contain_text("done")
    for row in rows.all():
        row.get_by_role("checkbox").check()
    shoot(page, "30-runs", PANEL)

    open_tab(page, "Compare")
    compared = page.locator(".wb-compared")
    expect(compared.get_by_role("table", name="Settings that differ")).to_contain_text("adapter.r")
    expect(compared.get_by_role("row", name="training.learning_rate")).to_contain_text("3e-3")
    assert compared.get_by_role("row").filter(has_text="data.").count() == 0, "what is the same is not shown"
    expect(compared.get_by_role("img", name="Loss:")).to_be_visible()
    press(page, "Estimate the variants")
    expect(page.locator(".wb-variants")).to_contain_text("adapter.r=", timeout=60_000)
    shoot(page, "31-compare", PANEL)

    open_tab(page, "Export")
    press(page, "Export")
    expect(page.locator(".wb-export-result [role=status]")).to_contain_text("exports/adapter", timeout=60_000)
    shoot(page, "32-export", PANEL)
    open_tab(page, "Chat")
    press(page, "Load both models")
    expect(page.locator(".wb-card-chat [role=status]")).to_contain_text("in memory", timeout=60_000)
    page.get_by_label("Prompt", exact=True).fill("<img src=x onerror='window.hacked=1'>")
    press(page, "Ask both")
    answers = page.locator(".wb-answer")
    expect(answers).to_have_count(2)
    for answer in answers.all():
        expect(answer).not_to_be_empty(timeout=60_000)
    expect(page.locator(".wb-chat-ask")).to_be_enabled(timeout=60_000)
    assert page.evaluate("() => window.hacked") is None
    shoot(page, "33-chat", PANEL)
    press(page, "Release")
    expect(page.locator(".wb-card-chat [role=status]")).to_contain_text("No model")

    open_tab(page, "Runs")
    rows.nth(0).get_by_role("checkbox").uncheck()
    press(page, "Take its settings")
    expect(page.locator(".wb-brand")).to_contain_text("LoRA r=16")
    press(page, "Rename")
    page.get_by_label("New name", exact=True).fill("the first run")
    press(page, "Save the name")
    expect(rows.nth(1)).to_contain_text("the first run")
    assert (lab.work / "compared" / "the first run" / "recipe.yaml").is_file()
    rows.nth(1).get_by_role("checkbox").check()
    press(page, "Delete…")
    asked = page.locator(".wb-asking [role=alert]")
    expect(asked).to_contain_text("become free")
    shoot(page, "34-delete", PANEL)
    press(page, "Delete for good")
    expect(rows).to_have_count(1)
    assert not (lab.work / "compared" / "the first run").exists()


def test_samples_show_and_tabs_are_reached_by_keyboard_in_chinese_dark_and_narrow(
    notebook: Callable[..., Notebook], lab: Lab, page: Any, shoot: Callable[..., None]
) -> None:
    write_rows(lab.work, "rows.jsonl", rows=24)
    page.set_viewport_size({"width": 480, "height": 1500})
    asked = {"evaluation.split": "auto", "evaluation.sample_prompts": ["<b>你好</b>"], "evaluation.num_samples": 1}
    run = "\npanel.start(); panel.wait()\npanel"
    book = notebook(panel_cell(SHORT | asked, run, ', run_root="shown", language="zh"'))
    page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    book.run_all()
    page.locator(PANEL).wait_for()
    samples = page.locator(".wb-sample")
    expect(samples).to_have_count(2, timeout=30_000)
    expect(samples.first).to_contain_text("<b>你好</b>")
    expect(samples.first.locator(".wb-side-head")).to_have_text(["第 0 步", "第 4 步"])
    expect(samples.last.locator(".wb-side-head").last).to_have_text("数据中的答案")
    shoot(page, "35-samples", ".wb-samples")

    page.get_by_role("tab", name="设置与运行", exact=True).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.get_by_role("tab", name="运行记录", exact=True)).to_have_attribute("aria-selected", "true")
    box = page.locator(".wb-runs-rows").get_by_role("checkbox")
    expect(box).to_have_count(1, timeout=30_000)
    box.focus()
    page.keyboard.press("Space")
    expect(box).to_be_checked()
    expect(page.get_by_role("button", name="打开", exact=True)).to_be_enabled()
    shoot(page, "36-runs-narrow", PANEL)
    for name, card in (("比较", "compare"), ("导出", "export"), ("对话", "chat")):
        open_tab(page, name)
        expect(page.locator(f".wb-card-{card}")).to_be_visible()
        shoot(page, f"37-{card}-narrow", PANEL)
        assert page.locator(PANEL).evaluate("(panel) => panel.scrollWidth <= panel.clientWidth + 1")
