"""The panel's controls are the Recipe's fields: none missing, none invented, each edits exactly its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from workbench.panel.comms import walk_widgets
from workbench.panel.fields import FieldView, build_fields, from_control, to_control
from workbench.panel.settings_view import SECTION_GROUPS, main_card
from workbench.panel.view_model import PanelModel
from workbench.recipe import FieldInfo, Recipe, field_info, iter_fields

SHOWN = [info for info in iter_fields() if info.show != "hidden"]
ALL = list(iter_fields())

# One other allowed value per type, for fields without choices.
OTHER_TEXTS: dict[str, Any] = {
    "model.name_or_path": "tiny-llama",
    "data.name_or_path": "rows.jsonl",
    "hardware.emulate": "Tesla T4",
    "adapter.target_modules": "q_proj, v_proj",
    "evaluation.split": "none",
    "training.upload_to": "file:///mnt/runs",
}


@pytest.fixture(scope="module")
def panel() -> Iterator[tuple[PanelModel, dict[str, FieldView]]]:
    model = PanelModel()
    yield model, build_fields(model, {"model.name_or_path": ["tiny-llama"]})


def other_value(info: FieldInfo) -> Any:
    """Return what a person could enter: another allowed value, as the control holds it."""
    if info.type_name == "bool":
        return not info.default
    if info.choices:
        return next(choice for choice in info.choices if choice != info.default)
    if info.path in OTHER_TEXTS:
        return OTHER_TEXTS[info.path]
    number = 0.5 if info.type_name == "float" else (info.default or 0) + 3
    return to_control(info, number)


def test_every_shown_field_has_a_control_and_no_other(panel: Any) -> None:
    _, fields = panel
    assert set(fields) == {info.path for info in SHOWN}


def test_hidden_fields_are_in_the_yaml_view(panel: Any) -> None:
    model, fields = panel
    values = Recipe.from_yaml(model.yaml_text()).to_dict()
    assert {f"{group}.{name}" for group, part in values.items() for name in part} == {info.path for info in ALL}
    assert {info.path for info in ALL} - set(fields) == {info.path for info in ALL if info.show == "hidden"}


def test_every_control_is_on_a_card_once() -> None:
    fields = build_fields(PanelModel())
    placed = [widget for number in (1, 2) for widget in walk_widgets(main_card(number, fields, ()))]
    for path, view in fields.items():
        assert sum(widget is view.control for widget in placed) == 1, path
    groups = [group for section in SECTION_GROUPS for group in section]
    assert sorted(groups) == sorted({info.group for info in SHOWN})


@pytest.mark.parametrize("info", SHOWN, ids=lambda info: info.path)
def test_control_shows_label_and_documentation(panel: Any, info: FieldInfo) -> None:
    _, fields = panel
    control = fields[info.path].control
    assert control.description == info.label
    assert control.tooltip == info.doc
    assert info.doc


@pytest.mark.parametrize("info", SHOWN, ids=lambda info: info.path)
def test_control_edits_its_field_and_only_that(info: FieldInfo) -> None:
    model = PanelModel()
    view = build_fields(model)[info.path]
    assert from_control(info, view.control.value) in (model.recipe.get(info.path), list_of(model.recipe.get(info.path)))
    view.control.value = other_value(info)
    assert set(Recipe().diff(model.recipe)) == {info.path}
    model.undo()
    view.refresh()
    assert model.recipe == Recipe()
    assert view.control.value == to_control(info, info.default)


@pytest.mark.parametrize(
    "info", [one for one in SHOWN if one.choices and one.type_name == "choice"], ids=lambda i: i.path
)
def test_lists_offer_exactly_the_allowed_values(panel: Any, info: FieldInfo) -> None:
    _, fields = panel
    assert [value for _, value in fields[info.path].control.options] == list(info.choices)


def test_limits_are_the_recipes() -> None:
    model = PanelModel()
    view = build_fields(model)["data.max_length"]
    view.control.value = 3
    assert model.recipe.data.max_length == 512
    (problem,) = model.problems()
    view.show_problems([problem])
    texts = " ".join(
        widget.value for widget in walk_widgets(view.box) if hasattr(widget, "value") and isinstance(widget.value, str)
    )
    assert field_info("data.max_length").label == view.control.description
    assert "from 8" in texts
    (button,) = [widget for widget in walk_widgets(view.box) if hasattr(widget, "click")]
    button.click()
    assert model.recipe.data.max_length == 8
    assert view.control.value == 3, "the control follows when the panel tells it"
    view.refresh()
    assert view.control.value == 8


def list_of(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
