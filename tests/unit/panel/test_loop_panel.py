"""The panel of a watched loop: live from its first step, complete when opened late, with its findings."""

import pytest
import torch
from torch import nn

import workbench
from workbench.panel.loop_panel import LoopPanel, WatchedLoop


def run(watch: object, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 5, bad: int = -1) -> None:
    with watch as w:  # type: ignore[attr-defined]
        for step in range(steps):
            loss = model(torch.ones(2, 4)).square().mean()
            if step == bad:
                raise ValueError("broken row")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            w.step(loss=loss, batch=torch.ones(2, 4))


@pytest.fixture
def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def test_a_panel_opened_before_the_loop_follows_it(parts: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    w = workbench.watch(*parts)
    loop = WatchedLoop(w)
    assert loop.state == "idle" and len(loop.history) == 0
    run(w, *parts)
    assert loop.state == "done"
    assert list(loop.history.column("step")) == [1, 2, 3, 4, 5]
    assert list(loop.history.column("loss")) == list(w.record.losses)
    assert loop.history.column("learning_rate")[-1] == 0.01


def test_a_panel_opened_late_shows_the_steps_before(parts: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    w = workbench.watch(*parts)
    run(w, *parts)
    loop = WatchedLoop(w)
    assert loop.state == "done" and list(loop.history.column("loss")) == list(w.record.losses)


def test_an_exception_is_shown_with_its_finding(parts: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    w = workbench.watch(*parts)
    panel = LoopPanel(w, plots="svg")
    with pytest.raises(ValueError, match="broken row"):
        run(w, *parts, bad=3)
    panel.refresh()
    assert "broken row" in panel._head.value and panel.loop.state == "failed"
    assert "broken row" in panel._findings.value
    panel.close()


def test_a_watch_shows_one_panel_and_its_text(parts: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    w = workbench.watch(*parts)
    run(w, *parts)
    assert w.panel() is w.panel()
    bundle = w._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in data
    assert "Watched 5 steps" in data["text/plain"]
    w.panel().close()
