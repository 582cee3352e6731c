"""The house has one direction: each package imports only what stands before it."""

import ast
from pathlib import Path

import pytest

import workbench

ROOT = Path(workbench.__file__).parent
ORDER = (
    "errors units events | recipe | hardware | components | estimate | plan | train | observe | diagnose | scale | "
    "report | export | pipeline | panel cli"
)
RANK = {name: rank for rank, group in enumerate(ORDER.split("|")) for name in group.split()}
# train must not know the recorders and meters it feeds: they reach it through protocols in events.
FORBIDDEN = {"train": {"observe"}, "panel": {"cli"}, "cli": {"panel"}}
# Names that only one package may import.
ONLY_IN = {
    "ipywidgets": {"panel"},
    "anywidget": {"panel"},
    "IPython": {"panel"},
    "argparse": {"cli"},
}
FILES = sorted(ROOT.rglob("*.py"))


def package_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def imported_modules(path: Path) -> list[tuple[str, int]]:
    """Return absolute dotted names of everything a file imports, at any depth of its code, with the line."""
    parts = ["workbench", *path.relative_to(ROOT).parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_stands_before_its_package(path: Path) -> None:
    package = package_of(path)
    if package == "__init__":
        return  # The front door names everything, lazily.
    for module, line in imported_modules(path):
        names = module.split(".")
        if names[0] != "workbench" or len(names) < 2 or names[1] not in RANK or names[1] == package:
            continue
        where = f"{path.name}:{line} imports {names[1]}"
        assert RANK[names[1]] <= RANK[package], where
        assert RANK[names[1]] < RANK[package] or RANK[package] == 0, where
        assert names[1] not in FORBIDDEN.get(package, ()), where


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_widgets_and_argument_parsers_stay_where_they_belong(path: Path) -> None:
    for module, line in imported_modules(path):
        owners = ONLY_IN.get(module.split(".")[0])
        assert owners is None or package_of(path) in owners, f"{path.name}:{line} imports {module}"


def test_every_package_has_its_place_in_the_order() -> None:
    assert {package_of(path) for path in FILES} - {"__init__"} <= set(RANK)


def test_training_arguments_are_named_in_one_file() -> None:
    naming = [
        path.relative_to(ROOT)
        for path in FILES
        if any(module.split(".")[-1] in ("TrainingArguments", "SFTConfig") for module, _ in imported_modules(path))
    ]
    assert len(naming) == 1 and naming[0].parts[0] == "train", naming


def test_only_units_holds_powers_of_two_for_display() -> None:
    for path in FILES:
        if path.name == "units.py":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert "2**30" not in line and "1 << 30" not in line and "1024**3" not in line, f"{path.name}:{number}"
