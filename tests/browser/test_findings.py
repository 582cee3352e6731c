"""Findings in a real JupyterLab: from an OOM to a running fix in one click, the checks before a run, a watched loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from playwright.sync_api import expect

from .lab import Notebook
from .test_workbench import PANEL, panel_cell, press

# Runs out in its first step, and fits with half the micro-batch.
FULL = {
    "model.name_or_path": "tiny-llama",
    "data.max_length": 256,
    "data.max_rows": 48,
    "evaluation.max_rows": 4,
    "training.max_steps": 4,
    "training.per_device_train_batch_size": 8,
    "training.gradient_accumulation_steps": 1,
    "hardware.device": "cpu",
    "hardware.emulate": "Tesla T4:210MiB",
}
WAIT_MS = 120_000

LOOP = """
import torch, workbench
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
history = []
w = workbench.watch(model, optimizer, look="now")
with w:
    for step in range(24):
        features = torch.randn(4, 8)
        loss = model(features).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss)
        w.step(loss=loss, batch=features)
w
"""


def test_from_an_oom_to_a_running_fix_is_one_click(
    notebook: Callable[..., Notebook], page: Any, shoot: Callable[..., None]
) -> None:
    notebook(panel_cell(FULL)).run_all()
    panel = page.locator(PANEL)
    panel.wait_for()
    press(page, "Try the longest batch")
    found = page.locator(".wb-before-found")
    expect(found).to_contain_text("activations are", timeout=WAIT_MS)
    shoot(page, "30-before", ".wb-before")
    press(page, "Start training")
    # Of those offered the one with most room: the cheapest is tight, and a longer batch comes later.
    apply = page.locator(".wb-card-train").get_by_role("button", name="Apply and continue").last
    expect(apply).to_be_visible(timeout=WAIT_MS)
    expect(page.locator(".wb-findings")).to_contain_text("at the failure")
    shoot(page, "31-out-of-memory", ".wb-card-train")
    apply.click()  # The one click.
    card = page.locator(".wb-card-train")
    expect(card).to_contain_text("step 4 of 4", timeout=WAIT_MS)
    expect(page.locator(".wb-card-train .wb-remedies:visible")).to_have_count(0, timeout=WAIT_MS)
    shoot(page, "32-continued", ".wb-card-train")


def test_a_watched_loop_shows_its_leak(
    notebook: Callable[..., Notebook], page: Any, shoot: Callable[..., None]
) -> None:
    notebook(LOOP).run_all()
    page.locator(PANEL).wait_for()
    expect(page.locator(".wb-run-head")).to_contain_text("Watched loop", timeout=WAIT_MS)
    expect(page.locator(".wb-findings")).to_contain_text("'history' collects tensors with their autograd graph")
    expect(page.locator(".wb-findings")).to_contain_text("Keep .detach()")
    shoot(page, "33-watched-loop", ".wb-card-train")
