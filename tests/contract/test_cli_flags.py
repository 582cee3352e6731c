"""The command line has every field of the Recipe, and only these."""

import argparse
import json

import pytest

from workbench.cli.arguments import add_recipe_arguments, read_recipe
from workbench.cli.main import build_parser, main
from workbench.recipe import Recipe, iter_fields


def recipe_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_recipe_arguments(parser)
    return parser


def test_every_field_has_one_flag_and_every_dotted_flag_is_a_field() -> None:
    flags = {option[2:] for action in recipe_parser()._actions for option in action.option_strings if "." in option}
    assert flags == {info.path for info in iter_fields()}


def example_of(info) -> tuple[str, object]:
    """Return a text that differs from the default, and the value that it means."""
    if info.type_name == "bool":
        return str(not info.default).lower(), not info.default
    if info.type_name == "choice":
        other = next(choice for choice in info.choices if choice != info.default)
        return str(other), other
    if info.type_name == "list":
        values = tuple(info.choices[:1]) or (("1", "2") if info.item_type != "str" else ("a", "b"))
        return ",".join(values), tuple(int(value) if value.isdigit() else value for value in values)
    if info.type_name == "dict":
        return json.dumps({"model_type": "llama"}), {"model_type": "llama"}
    if info.type_name in ("int", "float"):
        value = 9 if info.type_name == "int" else 0.5
        return str(value), value
    if info.path == "training.upload_to":
        return "file:///mnt/runs", "file:///mnt/runs"
    return "other", "other"


@pytest.mark.parametrize("info", list(iter_fields()), ids=lambda info: info.path)
def test_a_flag_set_and_yaml_mean_the_same(info) -> None:
    text, value = example_of(info)
    by_flag = read_recipe(recipe_parser().parse_args([f"--{info.path}", text]))
    by_set = read_recipe(recipe_parser().parse_args(["--set", f"{info.path}={text}"]))
    assert by_flag.get(info.path) == value
    assert by_flag == by_set == Recipe.from_yaml(by_flag.to_yaml())
    assert set(Recipe().diff(by_flag)) == {info.path}


def test_each_verb_is_there_and_has_json() -> None:
    verbs = build_parser()._subparsers._group_actions[0].choices
    assert set(verbs) >= {"lab", "estimate", "plan", "compare", "check", "train", "runs", "models"}
    for verb in verbs.values():
        assert "--json" in verb.format_help()


def test_all_problems_of_the_settings_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["estimate", "--set", "training.optim=adamm", "--set", "adapter.r=0", "--set", "nonsense", "--json"])
    shown = capsys.readouterr()
    assert code == 2
    problems = json.loads(shown.out)["error"]["problems"]
    assert len(problems) == 3
    assert any("allowed is one of adamw_torch_fused" in text for text in problems)
    assert any(text.startswith("adapter.r: 0 is not allowed; allowed is a whole number from 1") for text in problems)


def test_a_misspelt_field_names_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--set", "training.learnin_rate=1"]) == 2
    assert "Did you mean training.learning_rate" in capsys.readouterr().err


def test_a_yaml_file_and_a_preset_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "some.yaml", "--preset", "quick"]) == 2
    assert "not both" in capsys.readouterr().err
