"""Cost, utilization and progress per token are those of the rows."""

from __future__ import annotations

import pytest

from workbench.observe.economy import MIN_STEPS, measure_economy
from workbench.observe.history import History
from workbench.report.text import economy_lines


def history_of(losses, tokens, **columns) -> History:
    history = History()
    for step, (loss, count) in enumerate(zip(losses, tokens, strict=True), 1):
        row = {"step": step, "loss": loss, "num_tokens": 2 * count, "num_supervised_tokens": count}
        history.append(row | {name: values[step - 1] for name, values in columns.items()})
    return history


def test_progress_is_the_slope_over_learned_tokens() -> None:
    """A loss on a line over the tokens, whatever the steps' sizes."""
    tokens = [100, 300, 50, 700, 200, 400]
    learned, losses = 0, []
    for count in tokens:
        learned += count
        losses.append(5.0 - 0.25 * learned / 1000)
    assert measure_economy(history_of(losses, tokens)).loss_drop_per_1000_tokens == pytest.approx(0.25)
    assert measure_economy(history_of(losses[::-1], [300] * 6)).loss_drop_per_1000_tokens < 0
    assert measure_economy(history_of([5.0] * (MIN_STEPS - 1), [9] * (MIN_STEPS - 1))).loss_drop_per_1000_tokens is None


def test_cost_and_utilization() -> None:
    history = history_of(
        [3.0] * 5, [500] * 5, cost_usd=[0.1, 0.2, 0.3, 0.4, 0.5], utilization_fraction=[0.8, 1.0, 0.8, 1.0, 0.9]
    )
    economy = measure_economy(history)
    assert economy.cost_usd == 0.5
    assert economy.usd_per_1000_tokens == pytest.approx(1000 * 0.5 / 5000)
    assert economy.utilization_mean == pytest.approx(0.9)
    assert economy.utilization_std == pytest.approx(0.04**0.5 / 5**0.5)
    text = "\n".join(economy_lines({name: getattr(economy, name) for name in economy.__slots__}, 0.034))
    assert "0.50 USD, 0.10 USD per 1,000 tokens" in text and "utilization: 90 %" in text and "3.40 %" in text


def test_what_is_not_known_is_left_out() -> None:
    economy = measure_economy(History())
    values = {name: getattr(economy, name) for name in economy.__slots__}
    assert set(values.values()) == {None} and economy_lines(values) == []
