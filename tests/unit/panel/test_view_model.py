"""The panel's plain data: changes, refusals with a fix, undo, presets, YAML."""

from __future__ import annotations

import threading

import pytest

from workbench.panel.view_model import Change, PanelModel, describe_changes, format_field, nearest_allowed
from workbench.recipe import PRESETS, Recipe, TargetFacts, field_info, iter_fields

T4 = TargetFacts(name="Tesla T4", kind="cuda", bf16_native=False, compute_capability=(7, 5), for_estimate=True)


@pytest.fixture
def model() -> PanelModel:
    return PanelModel()


def test_a_change_is_told_with_its_fields(model: PanelModel) -> None:
    told: list[Change] = []
    model.listen(told.append)
    assert model.set_field("training.max_steps", 40)
    assert model.recipe.training.max_steps == 40
    assert told == [Change(frozenset({"training.max_steps"}), "edit")]


def test_setting_the_same_value_tells_nobody(model: PanelModel) -> None:
    told: list[Change] = []
    model.listen(told.append)
    model.set_field("training.max_steps", -1)
    assert told == []
    assert not model.can_undo


def test_a_refused_value_keeps_the_recipe_and_offers_a_fix(model: PanelModel) -> None:
    before = model.recipe
    assert not model.set_field("data.max_length", 3)
    assert model.recipe is before
    assert model.refused_value("data.max_length") == 3
    (problem,) = model.problems()
    assert problem.field == "data.max_length"
    assert "from 8" in problem.message
    assert problem.fix == (("data.max_length", 8),)
    assert model.apply_fix(problem) == ()
    assert model.recipe.data.max_length == 8
    assert model.problems() == ()


def test_a_good_value_after_a_refused_one_clears_the_problem(model: PanelModel) -> None:
    told: list[Change] = []
    model.set_field("training.learning_rate", "fast")
    model.listen(told.append)
    model.set_field("training.learning_rate", 2e-4)  # the value it has: still a change, as the refusal goes
    assert model.problems() == ()
    assert told == [Change(frozenset({"training.learning_rate"}), "edit")]


def test_rules_across_fields_name_the_field_and_a_value(model: PanelModel) -> None:
    model.set_fields({"data.packing": True, "data.group_by_length": True})
    (problem,) = model.problems()
    assert problem.field == "data.group_by_length"
    model.apply_fix(problem)
    assert model.problems() == ()
    assert model.recipe.data.packing


def test_the_target_device_adds_its_rules(model: PanelModel) -> None:
    told: list[Change] = []
    model.set_field("training.mixed_precision", "bf16")
    assert model.problems() == ()
    model.listen(told.append)
    model.set_target(T4)
    (problem,) = model.problems()
    assert problem.field == "training.mixed_precision"
    assert [change.reason for change in told] == ["target"]
    model.set_target(T4)
    assert len(told) == 1, "nothing new, nothing told"


def test_undo_and_redo_go_through_every_state(model: PanelModel) -> None:
    states = [model.recipe]
    for steps in (10, 20, 30):
        model.set_field("training.max_steps", steps)
        states.append(model.recipe)
    assert model.undo_text() == "Undo: training.max_steps 30 → 20"
    for expected in reversed(states[:-1]):
        assert model.undo()
        assert model.recipe == expected
    assert not model.undo()
    for expected in states[1:]:
        assert model.redo()
        assert model.recipe == expected
    assert not model.redo()


def test_undo_also_takes_back_what_was_refused(model: PanelModel) -> None:
    model.set_field("training.max_steps", 10)
    model.set_field("data.max_length", 1)
    told: list[Change] = []
    model.listen(told.append)
    model.undo()
    assert model.problems() == ()
    assert told[0].fields == {"training.max_steps", "data.max_length"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_keeps_model_data_and_hardware(model: PanelModel, name: str) -> None:
    mine = {"model.name_or_path": "tiny-llama", "data.name_or_path": "rows.jsonl", "hardware.emulate": "Tesla T4"}
    model.set_fields(mine)
    model.apply_preset(name)
    for path, value in {**PRESETS[name][1], **mine}.items():
        assert model.recipe.get(path) == value
    assert model.can_undo


def test_yaml_round_trip(model: PanelModel) -> None:
    model.set_fields({"training.max_steps": 7, "adapter.target_modules": ("q_proj", "v_proj")})
    other = PanelModel()
    assert other.apply_yaml(model.yaml_text()) == ()
    assert other.recipe == model.recipe
    third = PanelModel()
    assert third.apply_yaml(model.yaml_text(only_changed=True)) == ()
    assert third.recipe == model.recipe


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("training: {max_steps: many}", "training.max_steps"),
        ("training: {steps: 3}", "no such field"),
        ("training: [", "is not YAML"),
        ("- a\n- b", "list"),
    ],
)
def test_bad_yaml_changes_nothing(model: PanelModel, text: str, word: str) -> None:
    model.set_field("training.max_steps", 40)
    before = model.recipe
    problems = model.apply_yaml(text)
    assert problems
    assert word in " ".join(map(str, problems))
    assert model.recipe is before
    assert model.problems() == ()


def test_data_key_changes_with_what_decides_the_tokens_only(model: PanelModel) -> None:
    key = model.data_key()
    model.set_fields({"training.per_device_train_batch_size": 8, "data.padding": "max_length", "adapter.r": 4})
    assert model.data_key() == key
    for path, value in (("data.max_length", 64), ("model.name_or_path", "tiny-llama"), ("data.packing", True)):
        model.set_field(path, value)
        assert model.data_key() != key
        key = model.data_key()


def test_changes_from_many_threads_are_all_undoable(model: PanelModel) -> None:
    def change(offset: int) -> None:
        for step in range(20):
            model.set_field("training.max_steps", 1 + offset * 100 + step)

    threads = [threading.Thread(target=change, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count = 0
    while model.undo():
        count += 1
    assert count == 80
    assert model.recipe == Recipe()


@pytest.mark.parametrize(
    ("path", "value", "fix"),
    [
        ("data.max_length", 3, 8),
        ("data.max_length", 10**9, 1_048_576),
        ("training.max_grad_norm", -1.0, 0.0),
        ("training.learning_rate", 0.0, 2e-4),  # the limit itself is not allowed
        ("training.optim", "adam", "adamw_torch_fused"),
        ("training.per_device_train_batch_size", 0, 1),
    ],
)
def test_nearest_allowed_is_allowed(path: str, value: object, fix: object) -> None:
    found = nearest_allowed(field_info(path), value, Recipe().get(path))
    assert found == fix
    assert Recipe().with_changes({path: found}).get(path) == fix


def test_what_a_field_shows_is_read_back_as_the_same_value() -> None:
    values = {"training.learning_rate": 1.5e-5, "cost.price_per_hour_usd": 0.35, "data.max_rows": 100}
    recipe = Recipe().with_changes(values | {"adapter.target_modules": ("q_proj",)})
    for info in iter_fields():
        for source in (Recipe(), recipe):
            value = source.get(info.path)
            read = info.parse(format_field(value))
            assert source.with_changes({info.path: read}) == source, info.path


def test_many_changes_are_counted() -> None:
    changes = {f"training.x{i}": (0, 1) for i in range(5)}
    assert describe_changes(changes) == "training.x0 0 → 1, training.x1 0 → 1 and 3 more"
