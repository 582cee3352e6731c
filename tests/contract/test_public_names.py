"""What a user may rely on: the public names, that importing is light, and the exception tree."""

import inspect
import subprocess
import sys

import workbench
from workbench import errors

PUBLIC = {
    "Device",
    "Estimate",
    "LoopPanel",
    "Recipe",
    "Session",
    "Workbench",
    "__version__",
    "check",
    "clinic",
    "compare_recipes",
    "estimate_layouts",
    "estimate_run",
    "export_run",
    "find_device",
    "launch_run",
    "lightning_callback",
    "plan_run",
    "preset",
    "release",
    "start_session",
    "target_device",
    "try_worst_batch",
    "watch",
    "write_bug_report",
}


def test_public_names_are_these_and_all_load() -> None:
    assert set(workbench.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(workbench, name) is not None


def test_public_functions_and_classes_are_documented() -> None:
    for name in PUBLIC - {"__version__"}:
        assert inspect.getdoc(getattr(workbench, name)), name


def test_no_public_function_bears_the_name_of_a_package() -> None:
    from pathlib import Path

    packages = {path.parent.name for path in Path(workbench.__file__).parent.glob("*/__init__.py")}
    assert not packages & PUBLIC


def test_an_unknown_name_says_which_names_there_are() -> None:
    try:
        workbench.Trainer  # noqa: B018
    except AttributeError as error:
        assert "Public names: " in str(error) and "Workbench" in str(error)
    else:
        raise AssertionError("an unknown name must raise AttributeError")


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numpy", "pydantic", "yaml", "ipywidgets", "plotly", "IPython", "datasets"}
    assert not loaded_by("import workbench") & heavy


def test_settings_and_devices_load_no_torch() -> None:
    loaded = loaded_by("from workbench import Recipe, find_device; Recipe(); find_device('Tesla T4')")
    assert not loaded & {"torch", "transformers", "ipywidgets", "plotly"}


def test_a_run_without_bitsandbytes_can_be_imported_and_described() -> None:
    loaded_by("sys.modules['bitsandbytes'] = None; import workbench; workbench.Recipe(); workbench.estimate_run")


def test_every_error_is_a_workbench_error_with_a_docstring() -> None:
    found = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    assert len(found) >= 10
    for error in found:
        assert issubclass(error, errors.WorkbenchError) and error.__doc__


def test_a_missing_package_names_the_line_that_installs_it() -> None:
    error = errors.MissingPackageError("bitsandbytes", "A 4-bit base", extra="quantization")
    assert str(error) == (
        "A 4-bit base needs the package bitsandbytes, which is not installed. "
        "Run: pip install 'workbench[quantization]'"
    )
