"""One Recipe says everything: defaults that run, YAML there and back, every problem at once."""

from pathlib import Path

import pytest

from workbench.errors import RecipeError
from workbench.recipe import PRESETS, Recipe, field_info, iter_fields, preset
from workbench.recipe.parts import OPTIMIZERS


def problems_of(values: dict) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict(values)
    return {problem.field: problem.message for problem in caught.value.problems}


def test_a_file_that_names_only_model_and_data_is_a_lora_run(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model:\n  name_or_path: tiny-llama\ndata:\n  name_or_path: rows.jsonl\n")
    recipe = Recipe.from_yaml(path)
    assert recipe.model.name_or_path == "tiny-llama"
    assert recipe.adapter.method == "lora"
    assert recipe.training.effective_batch_size == 8


def test_yaml_comes_back_equal_whole_and_short() -> None:
    recipe = Recipe().with_changes(
        {"training.learning_rate": 1e-4, "adapter.target_modules": ["q_proj", "v_proj"], "data.max_rows": 7}
    )
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    short = recipe.to_yaml(only_changed=True)
    assert Recipe.from_yaml(short) == recipe
    assert len(short.splitlines()) < 12


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    assert Recipe.from_yaml("training:\n  learning_rate: 1e-4\n").training.learning_rate == 1e-4


def test_all_problems_come_at_once_each_with_what_is_allowed() -> None:
    found = problems_of(
        {
            "model": {"dtype": "float8", "name": "x"},
            "training": {"per_device_train_batch_size": "many", "learning_rate": -1},
            "trainin": {},
            "adapter": 3,
        }
    )
    assert set(found) == {
        "model.dtype",
        "model.name",
        "training.per_device_train_batch_size",
        "training.learning_rate",
        "trainin",
        "adapter",
    }
    assert "allowed is one of auto, float32, bfloat16, float16" in found["model.dtype"]
    assert found["training.per_device_train_batch_size"].startswith("'many' is not allowed; allowed is a whole number")
    assert "Did you mean" in found["model.name"]
    assert "Groups: model, data, adapter" in found["trainin"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2", "is not YAML"),
        ("- just\n- a list\n", "holds a list"),
    ],
)
def test_broken_yaml_says_what_was_seen(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.from_yaml(text)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.from_yaml(tmp_path / "none.yaml")


def test_an_empty_file_is_the_default() -> None:
    assert Recipe.from_yaml("") == Recipe()


def test_changes_leave_the_old_recipe_alone() -> None:
    old = Recipe()
    new = old.with_changes({"adapter.r": 64})
    assert old.adapter.r == 16
    assert old.diff(new) == {"adapter.r": (16, 64)}
    assert old.digest() != new.digest()
    with pytest.raises(Exception, match="frozen"):
        old.adapter.r = 3  # type: ignore[misc]


def test_unknown_fields_and_wrong_values_of_a_change_come_together() -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe().with_changes({"adapter.rank": 3, "adapter.r": 0})
    assert {problem.field for problem in caught.value.problems} == {"adapter.rank", "adapter.r"}


@pytest.mark.parametrize("info", list(iter_fields()), ids=lambda info: info.path)
def test_every_field_is_documented_labelled_and_has_a_valid_default(info) -> None:
    assert info.doc.endswith(".") and len(info.doc) > 15
    assert info.label and info.show in ("main", "more", "hidden")
    assert Recipe().get(info.path) == info.default


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name: str) -> None:
    from workbench.recipe import TargetFacts, find_problems

    target = TargetFacts("GPU", "cuda", bf16_native=True, compute_capability=(8, 0), for_estimate=True)
    assert find_problems(preset(name), target) == []


def test_an_unknown_preset_lists_the_presets() -> None:
    with pytest.raises(RecipeError, match="Presets: lora, quick"):
        preset("fast")


def test_the_optimizer_list_is_the_fields() -> None:
    assert field_info("training.optim").choices == OPTIMIZERS


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("adapter.r", "8", 8),
        ("training.learning_rate", "1e-4", 1e-4),
        ("quantization.load_in_4bit", "yes", True),
        ("adapter.target_modules", "q_proj, v_proj", ["q_proj", "v_proj"]),
        ("adapter.target_modules", "all-linear", "all-linear"),
        ("data.max_rows", "none", None),
        ("adapter.r", "x", "x"),
    ],
)
def test_text_of_a_person_is_read_as_the_field_means_it(path: str, text: str, value: object) -> None:
    assert field_info(path).parse(text) == value
