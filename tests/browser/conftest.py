"""One JupyterLab and one Chromium for all browser tests; a notebook with its own kernel for each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from .lab import Lab, Notebook

HERE = Path(__file__).parent
SCREENSHOTS = HERE / "screenshots"
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium_path() -> str | None:
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    path = chromium_path()
    if path is None:
        pytest.fail("No Chromium found. Install it: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1360, "height": 1500})
    page = context.new_page()
    page.set_default_timeout(30_000)
    errors: list[str] = []
    page.on("dialog", lambda dialog: dialog.accept())
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.script_errors = errors
    yield page
    report = getattr(request.node, "call_report", None)
    if report is not None and report.failed:
        SCREENSHOTS.mkdir(exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"failed-{request.node.name}.png")
    context.close()
    assert not errors, f"scripts in the page failed: {errors}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.when == "call":
        item.call_report = report


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    server = Lab(tmp_path_factory.mktemp("lab"))
    server.wait_until_up()
    yield server
    server.stop()


@pytest.fixture
def notebook(page: Any, lab: Lab, request: pytest.FixtureRequest) -> Iterator[Callable[..., Notebook]]:
    """Return a function that writes cells into a notebook, opens it and waits for its kernel."""

    def make(*cells: str, name: str | None = None) -> Notebook:
        file = name or f"{request.node.name}.ipynb"
        content = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        )
        nbformat.write(content, lab.work / file)
        return Notebook(page, lab, file).open()

    yield make
    lab.shut_kernels_down()


@pytest.fixture(scope="session")
def shoot() -> Callable[..., None]:
    """Return a function that keeps a picture of one state; an ignored folder holds them for people to look at."""
    SCREENSHOTS.mkdir(exist_ok=True)

    def take(page: Any, name: str, selector: str | None = None) -> None:
        target = page.locator(selector).first if selector else page
        target.screenshot(path=SCREENSHOTS / f"{name}.png")

    return take
