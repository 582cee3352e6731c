"""The plan and the explanation in a real JupyterLab: questions, one click that applies, and a band that is clicked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from playwright.sync_api import expect

from .lab import Notebook, wait_for
from .test_workbench import PANEL, panel_cell, press, wait_for_estimate

# Does not fit as it is, and fits with a smaller batch or without the logits of all tokens.
TIGHT = {
    "model.name_or_path": "tiny-llama",
    "data.max_length": 512,
    "training.per_device_train_batch_size": 32,
    "training.gradient_accumulation_steps": 1,
    "hardware.emulate": "Tesla T4:1GiB",
}


def verdict(page: Any) -> str:
    return page.locator(".wb-verdict-word").inner_text().strip().lstrip("✓≈✕ ")


def rows(page: Any) -> Any:
    return page.locator(".wb-plan-rows .wb-option-row")


def test_one_click_makes_it_fit_and_undo_takes_it_back(
    notebook: Callable[..., Notebook], page: Any, shoot: Callable[..., None]
) -> None:
    notebook(panel_cell(TIGHT)).run_all()
    page.locator(PANEL).wait_for()
    before = wait_for_estimate(page)
    wait_for(lambda: verdict(page) == "does not fit", 10, "the verdict")
    press(page, "▸ What fits: settings, batch, model, device")
    press(page, "Make it fit")
    after = wait_for_estimate(page, before, timeout_s=120)
    wait_for(lambda: verdict(page) == "fits", 10, "the verdict of the settings that fit")
    expect(page.locator(".wb-card-estimate [role=status]", has_text="Changed:")).to_contain_text("Undo takes it back")
    shoot(page, "20-made-to-fit", ".wb-card-estimate")
    press(page, "↶ Undo")
    assert wait_for_estimate(page, after) == before

    press(page, "Settings that fit")
    wait_for(lambda: rows(page).count() > 0, 120, "settings that fit")
    shoot(page, "21-settings", ".wb-card-estimate")
    rows(page).first.get_by_role("button", name="Apply").click()
    wait_for_estimate(page, before)
    wait_for(lambda: verdict(page) in ("fits", "tight"), 10, "the verdict of the chosen settings")
    press(page, "Which device")
    wait_for(lambda: rows(page).count() >= 10, 120, "devices")
    shoot(page, "22-devices", ".wb-card-estimate")


def test_a_clicked_band_shows_its_modules(
    notebook: Callable[..., Notebook], page: Any, shoot: Callable[..., None]
) -> None:
    notebook(panel_cell({"model.name_or_path": "tiny-llama", "data.max_length": 256})).run_all()
    page.locator(PANEL).wait_for()
    wait_for_estimate(page)
    press(page, "▸ Why this much memory")
    holders = page.locator(".wb-holders")
    expect(holders).to_contain_text("all of it in", timeout=60_000)
    plot = page.locator(".wb-explain .js-plotly-plot")
    plot.wait_for()
    shoot(page, "23-why", ".wb-card-estimate")

    # The middle of the activations' band, where the peak is.
    x, y = plot.evaluate(
        """(plot) => {
          const { xaxis, yaxis } = plot._fullLayout, box = plot.getBoundingClientRect();
          const bands = plot.data.filter((trace) => trace.meta);
          const sums = bands[0].x.map((_, i) => bands.reduce((sum, band) => sum + band.y[i], 0));
          const point = sums.indexOf(Math.max(...sums));
          let below = 0, middle = 0;
          for (const band of bands) {
            if (band.meta === 'activation') middle = below + band.y[point] / 2;
            below += band.y[point];
          }
          return [box.left + xaxis._offset + xaxis.d2p(point + 0.5), box.top + yaxis._offset + yaxis.d2p(middle)];
        }"""
    )
    page.mouse.click(x, y)
    wait_for(lambda: holders.inner_text().startswith("activations in"), 10, "the modules of the clicked band")
    expect(holders).to_contain_text("self_attn")
    shoot(page, "24-band", ".wb-explain")
    page.get_by_label("Category", exact=True).select_option(label="weights")
    wait_for(lambda: holders.inner_text().startswith("weights in"), 10, "the category that was chosen")
