from __future__ import annotations

from workbench.estimate.estimate import TimeEstimate
from workbench.plan.plan import DeviceChoice, DeviceTable, Largest, PlanOption, SettingsFront, Tried
from workbench.report.plan_tables import devices_table, front_table, largest_table, render_plan_row, render_plan_table
from workbench.report.text import describe_bound, describe_cost, format_usd
from workbench.units import GIB

CURRENT = PlanOption({}, 9 * GIB, 1.0, "does_not_fit")
ALTERED = PlanOption({"quantization.load_in_4bit": True}, 4 * GIB, 2.0, "fits", ("keeps the frozen weights in 4 bits",))


def test_front_says_what_is_altered_and_what_was_kept() -> None:
    front = SettingsFront("d", "Tesla T4", 8 * GIB, 8, CURRENT, (ALTERED,), ("adapter.r",), 12, False)
    table = front_table(front)
    assert table.changes == ({"quantization.load_in_4bit": True},)
    text = render_plan_table(table)
    for part in ("load_in_4bit=on", "4 GiB", "keeps the frozen weights in 4 bits", "not fit with 9 GiB",
                 "12 settings were estimated.", "budget ended the search", "as you set them: adapter.r."):  # fmt: skip
        assert part in text
    assert "No settings fit" in front_table(SettingsFront("d", "Tesla T4", 8 * GIB, 8, CURRENT, ())).title


def test_settings_as_they_are_have_nothing_to_apply() -> None:
    as_is = PlanOption({}, 4 * GIB, 1.0, "fits")
    table = front_table(SettingsFront("d", "Tesla T4", 8 * GIB, 8, as_is, (as_is, ALTERED)))
    assert table.rows[0][0] == "as it is"
    assert table.changes[0] is None
    assert table.changes[1] is not None


def test_only_the_largest_can_be_taken() -> None:
    tried = (Tried(2, GIB, 0.1, "fits"), Tried(12, 7 * GIB, 0.5, "fits"), Tried(13, 9 * GIB, 0.6, "tight"))
    changes = {"training.per_device_train_batch_size": 8, "training.gradient_accumulation_steps": 2}
    table = largest_table(Largest("batch", "Tesla T4", 8 * GIB, 12, changes, "13 would need 9 GiB.", tried, 3))
    assert table.title == "The largest batch size that fits on Tesla T4 is 12."
    assert table.changes == (None, changes, None)
    assert "stay the same with per_device_train_batch_size=8, gradient_accumulation_steps=2" in table.notes[1]
    none = largest_table(Largest("model", "Tesla T4", 8 * GIB, None, {}, "The catalogue has no larger model."))
    assert none.title == "No model fits on Tesla T4."


def test_devices_are_marked_and_problems_said() -> None:
    small = DeviceChoice("A", 8 * GIB, "fits", GIB, 2.0, 10.0, cost_usd_per_1000_tokens=(0.001, 0.002))
    fast = DeviceChoice("B", 16 * GIB, "fits", GIB, 1.0, 20.0)
    never = DeviceChoice("C", 16 * GIB, None, problem="does not compute bfloat16 <natively>")
    table = devices_table(DeviceTable("d", (small, fast, never)))
    assert [row[-1] for row in table.rows] == ["cheapest, smallest", "fastest", never.problem]
    assert table.rows[0][4] == "1.00 to 2.00"
    assert table.changes == ({"hardware.emulate": "A"}, {"hardware.emulate": "B"}, None)
    assert table.title == "It fits on 2 of 3 devices."
    assert "&lt;natively&gt;" in render_plan_row(table.header, table.rows[2])


def test_bound_and_cost_in_words() -> None:
    time = TimeEstimate(
        step_s=1.0, tokens_per_s=100.0, samples_per_s=1.0, seconds_by_class={}, flops=1.0, basis="table",
        interval_s=(0.5, 2.0), cost_usd=(0.5, 1.5), cost_usd_per_1000_tokens=(0.00002, 0.00003),
        seconds_by_limit={"compute": 0.2, "bandwidth": 0.7, "launch": 0.1},
    )  # fmt: skip
    assert describe_bound(time).startswith("Bound by memory bandwidth: of a step 70 % moves data")
    assert describe_cost(time).startswith("0.50 to 1.50 USD for the run, 0.000020 to 0.000030 USD per 1,000 tokens")
    assert format_usd(0.5, 0.5) == "0.50"
    assert format_usd(0.0, 0.0) == "0.00"
