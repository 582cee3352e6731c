"""The files a fresh machine is set up from say the same."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_environment_yml_has_the_dependencies_of_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    wanted = {*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["quantization"]}
    assert {item for item in pip if not item.startswith("-e")} == wanted


def test_constraints_pin_every_direct_dependency_exactly() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all("==" in line for line in lines)
    pinned = {name_of(line) for line in lines}
    extras = [item for group in PROJECT["optional-dependencies"].values() for item in group]
    wanted = {name_of(item) for item in [*PROJECT["dependencies"], *extras]}
    assert wanted <= pinned, wanted - pinned
    assert "torch==2.13.0" in lines


def test_the_package_admits_ranges_so_that_an_installed_torch_is_kept() -> None:
    torch = next(item for item in PROJECT["dependencies"] if name_of(item) == "torch")
    assert torch.startswith("torch>=") and "==" not in torch and "<" not in torch


def test_ci_runs_make_test() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert "make test" in lines


def test_notebooks_carry_no_stored_output() -> None:
    import nbformat

    found = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert found
    for path in found:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                assert not cell.outputs and cell.execution_count is None, path.name
