"""``workbench lab``: JupyterLab on the first notebook, on loopback with a token."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path
from typing import Any

from ..errors import WorkbenchError

FIRST_NOTEBOOK = "01-first-run.ipynb"
START_SECONDS = 90.0

_STARTER_CELLS = (
    ("markdown", "# First run\nPick a model, a data set and settings in the panel below; watch the estimate; train."),
    ("code", "import workbench\n\npanel = workbench.Workbench()\npanel"),
)


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("lab", help="open JupyterLab on the first notebook", description=__doc__)
    parser.add_argument("notebook", nargs="?", help=f"notebook to open; default: notebooks/{FIRST_NOTEBOOK}")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--port", type=int, default=8888, help="first port to try; default 8888")
    parser.add_argument("--json", action="store_true", help="print the address as a JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted."""
    notebook = _find_notebook(options.notebook)
    port, token = _free_port(options.port), secrets.token_hex(24)
    environment = dict(os.environ, JUPYTER_TOKEN=token)  # Not an argument: other users can list arguments.
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={notebook.parent}",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        "--ServerApp.open_browser=False",
        "--ServerApp.log_level=ERROR",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--ServerApp.allow_root=True")  # In a container root is the only user.
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # The server must not outlive this process.
    server = subprocess.Popen(command, env=environment)
    address = f"http://127.0.0.1:{port}/lab/tree/{notebook.name}?token={token}"
    try:
        _wait_until_up(server, port)
        print(json.dumps({"url": address, "pid": server.pid}) if options.json else f"Open {address}", flush=True)
        if not options.no_browser:
            webbrowser.open(address)
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        _stop(server)


def _find_notebook(wanted: str | None) -> Path:
    """Return the notebook to open; without one nearby, a starter is written into the current folder."""
    if wanted:
        path = Path(wanted)
        if not path.is_file():
            raise WorkbenchError(f"{wanted} is not a notebook file. Leave it out to open notebooks/{FIRST_NOTEBOOK}.")
        return path.resolve()
    for folder in (Path.cwd() / "notebooks", Path.cwd(), Path(__file__).resolve().parents[2] / "notebooks"):
        if (folder / FIRST_NOTEBOOK).is_file():
            return folder / FIRST_NOTEBOOK
    path = Path.cwd() / FIRST_NOTEBOOK
    path.write_text(json.dumps(_starter_notebook(), indent=1), encoding="utf-8")
    return path


def _starter_notebook() -> dict[str, Any]:
    """Return a notebook of format 4.5 with the panel in its one code cell."""
    cells: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(_STARTER_CELLS):
        code: dict[str, Any] = {"outputs": [], "execution_count": None} if kind == "code" else {}
        cells.append({"cell_type": kind, "id": f"start-{number}", "metadata": {}, "source": text, **code})
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


def _free_port(first: int) -> int:
    for port in range(first, first + 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise WorkbenchError(f"Ports {first} to {first + 99} are all in use. Choose another: --port 9900.")


def _wait_until_up(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise WorkbenchError(f"JupyterLab ended with code {server.returncode}. Its message stands above.")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api", timeout=2):
                return
        except urllib.error.HTTPError:
            return  # It answers; that it wants the token is right.
        except OSError:
            time.sleep(0.2)
    raise WorkbenchError(f"JupyterLab did not answer on port {port} within {START_SECONDS:.0f} s.")


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
