"""The main job in a real JupyterLab: pick, estimate, train, pause, reload, stop, find the run; and what goes wrong."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from .lab import Lab, Notebook, wait_for

PANEL = ".wb-panel"
LONG_RUN = {
    "model.name_or_path": "tiny-llama",
    "data.max_length": 64,
    "training.max_steps": 5000,
    "evaluation.split": "none",
}
SETUP = "import torch; torch.set_num_threads(1)\nfrom workbench import Workbench, Recipe\n"
PAYLOAD = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>'


def panel_cell(changes: dict[str, Any], tail: str = "panel", arguments: str = "") -> str:
    return f"{SETUP}panel = Workbench(Recipe().with_changes({changes!r}){arguments})\n{tail}"


def shown_recipe(page: Any) -> str | None:
    """Return the digest of the settings that the estimate on screen is for; None while it is being computed."""
    if page.locator(".wb-card-estimate.wb-busy").count() or not page.locator(".wb-estimate[data-recipe]").count():
        return None
    return page.locator(".wb-estimate[data-recipe]").get_attribute("data-recipe")


def wait_for_estimate(page: Any, before: str | None = None, timeout_s: float = 90) -> str:
    """Return the digest on screen once it is another than ``before``."""
    return wait_for(
        lambda: (found := shown_recipe(page)) and found != before and found,
        timeout_s,
        "an estimate of the new settings",
    )


def activations(page: Any) -> str:
    """Return the bytes of activations on screen, which model, data and checkpointing all change."""
    return page.locator(".wb-legend li", has_text="activations").locator("b").inner_text()


def state(page: Any) -> str:
    return page.locator(".wb-pill").inner_text().strip()


def wait_for_state(page: Any, *wanted: str, timeout_s: float = 90) -> None:
    wait_for(lambda: state(page) in wanted, timeout_s, f"state {' or '.join(wanted)}")


def step(page: Any) -> int:
    found = re.search(r"step (\d+)", page.locator(".wb-card-train").inner_text())
    return int(found.group(1)) if found else 0


def first_step_drawn(page: Any) -> str:
    """Return the aria-label of the loss plot: it names the newest values."""
    return page.locator(".wb-card-train canvas").first.get_attribute("aria-label")


def set_text(page: Any, field: str, value: str) -> None:
    box = page.locator(f".wb-f-{field.replace('.', '-')} input").first
    box.fill(value)
    box.press("Enter")


def choose(page: Any, field: str, label: str) -> None:
    page.locator(f".wb-f-{field.replace('.', '-')} select").last.select_option(label=label)


def press(page: Any, name: str) -> None:
    page.locator(PANEL).get_by_role("button", name=name, exact=True).click()


def write_rows(folder: Path, name: str, rows: int = 200, answer: str = "a short answer") -> None:
    lines = [
        json.dumps(
            {"messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": answer}]}
        )
        for i in range(rows)
    ]
    (folder / name).write_text("\n".join(lines), encoding="utf-8")


def test_main_job(notebook: Callable[..., Notebook], lab: Lab, page: Any, shoot: Callable[..., None]) -> None:
    write_rows(lab.work, "rows.jsonl")
    book = notebook(panel_cell({}), "1 + 1")
    book.run_all()
    page.locator(PANEL).wait_for()

    # Pick: each change moves the estimate.
    first = wait_for_estimate(page)
    numbers = [activations(page)]
    shoot(page, "1-estimate")
    choose(page, "model.name_or_path", "tiny-llama")
    second = wait_for_estimate(page, first)
    numbers.append(activations(page))
    set_text(page, "data.name_or_path", "rows.jsonl")
    third = wait_for_estimate(page, second)
    press(page, "▸ Preview rows and lengths")
    page.locator(".wb-learned", has_text="a short answer").first.wait_for()
    page.locator(".wb-data-facts").wait_for(timeout=60_000)
    wait_for(lambda: shown_recipe(page) and activations(page) not in numbers, 60, "an estimate from the real lengths")
    numbers.append(activations(page))
    shoot(page, "2-preview")
    press(page, "▾ Preview rows and lengths")
    page.get_by_label("Gradient checkpointing", exact=True).check()
    fourth = wait_for_estimate(page, third)
    numbers.append(activations(page))
    assert len(set(numbers)) == 4, numbers
    assert page.locator(".wb-verdict-word").inner_text().split()[-1] in ("fits", "tight")
    press(page, "↶ Undo")
    assert wait_for_estimate(page, fourth) == third
    wait_for(lambda: activations(page) == numbers[2], 10, "the number before the toggle")

    # Train, on enough steps that the rest of the story fits in.
    set_text(page, "training.max_steps", "5000")
    set_text(page, "data.max_length", "64")
    press(page, "Start training")
    wait_for_state(page, "running")
    wait_for(lambda: step(page) >= 20, 60, "20 steps")
    wait_for(lambda: "each step" in (first_step_drawn(page) or ""), 20, "the plot of the loss")
    shoot(page, "3-running", PANEL)

    # Pause: the steps stand still.
    press(page, "Pause")
    wait_for_state(page, "paused")
    stood = step(page)
    time.sleep(1.5)
    assert step(page) == stood
    shoot(page, "4-paused", ".wb-card-train")
    press(page, "Resume")
    wait_for(lambda: step(page) > stood, 30, "steps after Resume")

    # Reload in the middle: the run went on, and the plots begin at step 1.
    before = step(page)
    book.reload()
    page.locator(PANEL).wait_for()
    wait_for(lambda: step(page) > before, 60, "steps after the reload")
    wait_for(lambda: "each step" in (first_step_drawn(page) or ""), 20, "the plots after the reload")
    assert oldest_step(page) == 1
    shoot(page, "5-reloaded", ".wb-card-train")

    # Stop, and find the saved run.
    press(page, "Stop and save")
    wait_for_state(page, "stopped")
    result = page.locator(".wb-result", has_text="Saved in").inner_text()
    run_dir = lab.work / re.search(r"Saved in (\S+?)\.? Open", result).group(1)
    assert (run_dir / "adapter_model.safetensors").is_file()
    rows = (run_dir.parent / "metrics.jsonl").read_text().splitlines()
    assert len(rows) >= stood
    shoot(page, "6-stopped", ".wb-card-train")
    assert book.text(0).startswith("Fine-tuning panel"), "what remains where widgets do not load"


def oldest_step(page: Any) -> int:
    """Read the oldest step drawn by pointing at the left edge of the loss plot's axis."""
    return page.evaluate(
        """async () => {
          const canvas = document.querySelector('.wb-card-train canvas');
          const text = [];
          const original = CanvasRenderingContext2D.prototype.fillText;
          CanvasRenderingContext2D.prototype.fillText = function (t, ...rest) {
            text.push(t);
            return original.call(this, t, ...rest);
          };
          const box = canvas.getBoundingClientRect();
          canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + 80, clientY: box.top + 20 }));
          await new Promise((r) => setTimeout(r, 200));
          CanvasRenderingContext2D.prototype.fillText = original;
          const label = text.find((t) => t.startsWith('step '));
          return label ? Number(label.slice(5)) : null;
        }"""
    )


def test_buttons_answer_while_a_cell_runs(notebook: Callable[..., Notebook], page: Any) -> None:
    book = notebook(panel_cell(LONG_RUN, "session = panel.start()\npanel"), "import time\ntime.sleep(25)")
    book.start_cell(0)
    page.locator(PANEL).wait_for()
    wait_for_state(page, "running")
    book.start_cell(1)
    time.sleep(1.0)
    assert not book.is_done(1)
    for name, wanted in (("Pause", "paused"), ("Resume", "running")):
        began = time.monotonic()
        press(page, name)
        wait_for(lambda wanted=wanted: state(page) == wanted, 10, wanted)
        # 0.3 s is the aim and what an idle machine shows; a busy one must still be far from the cell's 25 s.
        assert time.monotonic() - began < 2.0
    assert not book.is_done(1), "the cell was still running"
    press(page, "Stop and save")
    wait_for_state(page, "stopped", timeout_s=20)


def test_a_second_panel_attaches_and_a_second_run_is_refused(notebook: Callable[..., Notebook], page: Any) -> None:
    again = (
        "second = Workbench()\ntry:\n    second.start()\n"
        "except Exception as error:\n    print(type(error).__name__, error)\nsecond"
    )
    book = notebook(
        panel_cell(LONG_RUN, "session = panel.start()\npanel"), again, "panel.stop(); print(panel.wait().state)"
    )
    book.start_cell(0)
    page.locator(PANEL).first.wait_for()
    wait_for_state(page.locator(PANEL).first, "running")
    book.start_cell(1)
    wait_for(lambda: page.locator(PANEL).count() == 2, 30, "the second panel")
    second = page.locator(PANEL).nth(1)
    wait_for(lambda: step(second) > 5, 60, "steps in the second panel")
    wait_for(lambda: "RunError A run is running in this kernel" in book.text(1), 10, "the refusal")
    second.get_by_role("button", name="Pause", exact=True).click()
    wait_for_state(page.locator(PANEL).first, "paused", timeout_s=20)
    book.start_cell(2)
    wait_for(lambda: "stopped" in book.text(2), 30, "the end of the run")


def test_text_from_outside_is_never_markup(
    notebook: Callable[..., Notebook], lab: Lab, page: Any, shoot: Callable[..., None]
) -> None:
    write_rows(lab.work, "evil.jsonl", 20, answer=PAYLOAD)
    book = notebook(panel_cell({"model.name_or_path": "tiny-llama", "data.name_or_path": "evil.jsonl"}))
    book.run_all()
    page.locator(PANEL).wait_for()
    press(page, "▸ Preview rows and lengths")
    expect(page.locator(".wb-row-text").first).to_contain_text(PAYLOAD, timeout=60_000)
    set_text(page, "model.name_or_path", PAYLOAD)
    expect(page.locator(".wb-card-estimate [role=alert]")).to_contain_text("window.hacked", timeout=60_000)
    shoot(page, "7-errors")
    press(page, "Start training")
    page.locator(".wb-card-train [role=alert]").first.wait_for(timeout=60_000)
    assert page.evaluate(
        "() => window.hacked === undefined && !document.querySelector('.wb-panel img, .wb-panel script')"
    )


def test_problems_are_beside_their_field_with_a_fix(
    notebook: Callable[..., Notebook], page: Any, shoot: Callable[..., None]
) -> None:
    book = notebook(panel_cell({"model.name_or_path": "tiny-llama"}))
    book.run_all()
    page.locator(PANEL).wait_for()
    wait_for_estimate(page)
    page.get_by_label("4-bit base", exact=True).check()
    choose(page, "adapter.method", "none (train every weight)")
    problem = page.locator(".wb-f-adapter-method .wb-problem")
    expect(problem).to_contain_text("4 bits cannot be trained")
    set_text(page, "data.max_length", "3")
    page.locator(".wb-f-data-max_length .wb-problem").wait_for()
    shoot(page, "8-problems")
    press(page, "Set data.max_length to 8")
    page.locator(".wb-f-data-max_length .wb-problem").wait_for(state="detached")
    expect(page.locator(".wb-f-data-max_length input")).to_have_value("8")
    press(page, "Set adapter.method to lora")
    problem.wait_for(state="detached")


def test_yaml_view_loses_nothing(notebook: Callable[..., Notebook], page: Any, shoot: Callable[..., None]) -> None:
    book = notebook(panel_cell({"model.name_or_path": "tiny-llama"}))
    book.run_all()
    page.locator(PANEL).wait_for()
    press(page, "YAML")
    area = page.locator(".wb-yaml textarea")
    area.wait_for()
    good = wait_for(area.input_value, 10, "the Recipe as text")
    assert "name_or_path: tiny-llama" in good
    bad = good.replace("max_length: 512", "max_length: many")
    area.fill(bad)
    area.blur()
    press(page, "Apply")
    expect(page.locator(".wb-yaml [role=alert]")).to_contain_text("data.max_length")
    assert area.input_value() == bad
    shoot(page, "9-yaml")
    area.fill(good.replace("max_length: 512", "max_length: 96"))
    area.blur()
    press(page, "Apply")
    expect(page.locator(".wb-f-data-max_length input")).to_have_value("96")


def test_svg_fallback_uses_core_widgets_only(
    notebook: Callable[..., Notebook], page: Any, shoot: Callable[..., None]
) -> None:
    changes = {**LONG_RUN, "training.max_steps": 25}
    kinds = (
        "from workbench.panel.comms import walk_widgets\n"
        "print(sorted({w._model_module for w in walk_widgets(panel.widget)}))\nprint(panel.wait().state)"
    )
    book = notebook(panel_cell(changes, "session = panel.start()\npanel", ", plots='svg'"), kinds)
    book.run_all()
    page.locator(".wb-charts-svg svg").first.wait_for()
    wait_for_state(page, "done")
    assert "['@jupyter-widgets/controls']\n" in book.text(1)
    label = page.locator(".wb-charts-svg svg").first.get_attribute("aria-label")
    assert label.startswith("Loss: each step")
    published = wait_for(
        lambda: "<svg" in str(book.outputs(0)[-1]) and book.outputs(0)[-1], 10, "the result's own output"
    )
    assert "Fine-tuning panel: done, step 25 of 25" in "".join(published["data"]["text/html"])
    shoot(page, "10-svg", ".wb-card-train")


def test_an_ended_run_is_opened_from_its_folder(
    notebook: Callable[..., Notebook], page: Any, shoot: Callable[..., None]
) -> None:
    changes = {**LONG_RUN, "training.max_steps": 30}
    run = f"from workbench import start_session\nsession = start_session(Recipe().with_changes({changes!r})).wait()"
    book = notebook(f"{SETUP}{run}\nWorkbench.open(session.run_dir)")
    book.run_all()
    page.locator(PANEL).wait_for()
    wait_for(lambda: "each step" in (first_step_drawn(page) or ""), 20, "the plots")
    wait_for_state(page, "done")
    wait_for(lambda: step(page) == 30, 20, "the last step")
    expect(page.locator(PANEL).get_by_role("button", name="Pause", exact=True)).to_be_disabled()
    shoot(page, "11-opened")


@pytest.mark.parametrize(("width", "theme"), [(480, "light"), (1360, "dark")])
def test_other_widths_and_themes(
    notebook: Callable[..., Notebook], page: Any, shoot: Callable[..., None], width: int, theme: str
) -> None:
    page.set_viewport_size({"width": width, "height": 1600})
    book = notebook(panel_cell({"model.name_or_path": "tiny-llama"}), name=f"look-{width}-{theme}.ipynb")
    if theme == "dark":
        page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Dark' })")
    book.run_all()
    page.locator(PANEL).wait_for()
    wait_for_estimate(page)
    overflow = page.evaluate(
        """() => { const p = document.querySelector('.wb-panel'), right = p.getBoundingClientRect().right;
          return [...p.querySelectorAll('.wb-card, input, select, button, svg.wb-bar')]
            .filter((e) => e.offsetParent && e.getBoundingClientRect().right > right + 1).map((e) => e.className); }"""
    )
    assert overflow == []
    shoot(page, f"12-{theme}-{width}")
