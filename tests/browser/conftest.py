"""One JupyterLab and one Chromium for all browser tests; a notebook with its own kernel for each."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

HERE = Path(__file__).parent
SCREENSHOTS = HERE / "screenshots"
TOKEN = "browser-tests"
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Lab's own settings: no news, no update checks, nothing saved behind the test's back, all cells in the page.
LAB_SETTINGS = {
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin.jupyterlab-settings": {"autosave": False},
}


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


class Lab:
    """A JupyterLab server on its own folders and port."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root / "work"
        self.work.mkdir(parents=True)
        settings = root / "settings"
        for name, values in LAB_SETTINGS.items():
            file = settings / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        env = dict(os.environ)
        for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
            env[f"JUPYTER_{name}"] = str(root / name.lower())
        env |= {
            "JUPYTERLAB_SETTINGS_DIR": str(settings),
            "JUPYTERLAB_WORKSPACES_DIR": str(root / "workspaces"),
            "IPYTHONDIR": str(root / "ipython"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",
        }
        env.pop("PYTEST_CURRENT_TEST", None)
        command = [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={self.port}",
            "--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={self.work}",
            "--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly", "--LabApp.news_url=",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--ServerApp.terminals_enabled=False",
        ]  # fmt: skip
        self.log = open(root / "server.log", "w")  # noqa: SIM115  closed in stop
        self.process = subprocess.Popen(
            command, env=env, stdout=self.log, stderr=subprocess.STDOUT, preexec_fn=_die_with_parent
        )

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def api(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(
            f"{self.address}/api/{path}", method=method, headers={"Authorization": f"token {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def wait_until_up(self, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.root / "server.log").read_text()
            try:
                self.api("status")
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("JupyterLab did not start:\n" + (self.root / "server.log").read_text())

    def shut_kernels_down(self) -> None:
        for kernel in self.api("kernels"):
            self.api(f"kernels/{kernel['id']}", "DELETE")

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.shut_kernels_down()  # a killed server would leave them behind
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


def _die_with_parent() -> None:
    """Linux ends the server when the test process ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    server = Lab(tmp_path_factory.mktemp("lab"))
    server.wait_until_up()
    yield server
    server.stop()


class Notebook:
    """A notebook open in JupyterLab, driven through the page."""

    READY = """() => {
      const app = window.jupyterapp, panel = app && app.shell.currentWidget;
      if (!panel || !panel.context) return 'no notebook';
      const session = panel.context.sessionContext;
      if (!panel.context.isReady || !session.isReady) return 'not ready';
      const kernel = session.session && session.session.kernel;
      return kernel && kernel.connectionStatus === 'connected' && kernel.status === 'idle' ? 'ready' : 'kernel';
    }"""
    CELLS = "window.jupyterapp.shell.currentWidget.content.widgets"

    def __init__(self, page: Any, lab: Lab, name: str) -> None:
        self.page, self.lab, self.name = page, lab, name

    def open(self) -> Notebook:
        self.page.goto(f"{self.lab.address}/doc/tree/{self.name}?token={TOKEN}")
        return self.wait_until_ready()

    def wait_until_ready(self) -> Notebook:
        wait_for(lambda: self._evaluate(self.READY) == "ready", 60, "the notebook and its kernel")
        return self

    def reload(self) -> Notebook:
        self.save()
        self.page.reload()
        return self.wait_until_ready()

    def save(self) -> None:
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def run_all(self) -> None:
        self.page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")

    def start_cell(self, index: int) -> None:
        """Run a cell and return at once."""
        self.page.evaluate(
            "(i) => { const nb = window.jupyterapp.shell.currentWidget.content; nb.activeCellIndex = i;"
            " nb.deselectAll(); window.jupyterapp.commands.execute('notebook:run-cell'); }",
            index,
        )

    def is_done(self, index: int) -> bool:
        return bool(
            self._evaluate(
                f"() => {{ const m = {self.CELLS}[{index}].model;"
                " return m.executionState === 'idle' && m.executionCount !== null; }"
            )
        )

    def outputs(self, index: int) -> list[dict[str, Any]]:
        return self.page.evaluate(f"() => {self.CELLS}[{index}].model.outputs.toJSON()")

    def text(self, index: int) -> str:
        parts = []
        for output in self.outputs(index):
            parts.append("".join(output.get("text", "")) or str(output.get("data", {}).get("text/plain", "")))
            parts.append("\n".join(output.get("traceback", ())))
        return "\n".join(part for part in parts if part)

    def _evaluate(self, script: str) -> Any:
        try:
            return self.page.evaluate(script)
        except Exception as error:  # Lab navigates once more after ?reset
            if "context was destroyed" in str(error) or "navigat" in str(error):
                return None
            raise


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Return the first true value of ``condition``, asked ten times a second."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)


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
