"""The panel speaks each of its languages wholly."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench
from workbench.panel.comms import walk_widgets
from workbench.panel.plan_view import QUESTIONS
from workbench.panel.runs_model import HEADER, SORTS
from workbench.panel.settings_view import GROUP_TITLES
from workbench.panel.texts import LanguageError, Say
from workbench.panel.texts_zh import ZH
from workbench.recipe import Recipe, iter_fields
from workbench.report.text import STATE_LABELS

PACKAGE = Path(workbench.__file__).parent
# The panel of a watched loop has words of its own.
FILES = sorted({*(PACKAGE / "panel").glob("*.py")} - {PACKAGE / "panel" / "loop_panel.py"})
SAID_ELSEWHERE = (PACKAGE / "report" / "runs_html.py", PACKAGE / "report" / "run_html.py")
SPEAKERS = ("say", "_say", "_say_done")


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", "")), node


def is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def said() -> set[str]:
    """Return every English text that the panel says."""
    texts = {
        node.args[0].value
        for path in (*FILES, *SAID_ELSEWHERE)
        for name, node in calls(path)
        if name in SPEAKERS
        and node.args
        and is_constant(node.args[0])
        # An ErrorBox also says; what it is given is translated before.
        and "error" not in ast.unparse(node.func).lower()
    }
    tables = {*HEADER, *SORTS, *GROUP_TITLES.values(), *STATE_LABELS}
    asked = {text for pair in QUESTIONS.values() for text in pair}
    return texts | tables | asked | {info.label for info in iter_fields() if info.show != "hidden"}


def test_chinese_is_complete_and_has_no_leftovers() -> None:
    assert said() - set(ZH) == set()
    assert set(ZH) - said() == set()


def test_translations_fill_in_the_same_values() -> None:
    def names(text: str) -> set[str]:
        return {name for _, name, _, _ in string.Formatter().parse(text) if name}

    for english, chinese in ZH.items():
        assert names(english) == names(chinese), english


def test_no_label_of_the_panel_is_bare() -> None:
    bare = [
        f"{path.name}:{node.lineno} {node.args[place].value}"
        for path in FILES
        for name, node in calls(path)
        for place in {"button": (0,), "card": (1, 2), "Fold": (0,), "subtitle": (0,)}.get(name, ())
        if len(node.args) > place and is_constant(node.args[place]) and node.args[place].value != "YAML"
    ]
    assert bare == []


def test_an_unknown_language_names_those_there_are() -> None:
    with pytest.raises(LanguageError, match="'fr' has no texts; there are 'en', 'zh'"):
        Say("fr")


def test_a_chinese_panel_shows_no_english_button() -> None:
    panel = workbench.Workbench(Recipe().with_changes({"model.name_or_path": "tiny-llama"}), language="zh")
    try:
        words = [one.description for one in walk_widgets(panel.widget) if hasattr(one, "button_style")]
        assert "开始训练" in words
        assert {word for word in words if not any(letter >= "\u4e00" for letter in word)} == {"YAML"}
    finally:
        panel.close()
