"""A JupyterLab server for the tests, and a notebook in it driven through the page."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKEN = "browser-tests"
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
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


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
