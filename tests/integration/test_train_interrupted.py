"""A run that is interrupted, killed, or meets a bad folder: nothing is lost, and it goes on from where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from workbench.observe.history import History
from workbench.train.run_folder import list_checkpoints, summarise_run

SETTINGS = (
    "model.name_or_path=tiny-llama",
    "data.max_length=64",
    "data.max_rows=200",
    "training.max_steps=400",
    "training.gradient_accumulation_steps=2",
    "training.save_steps=5",
    "evaluation.split=none",
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def _command(*arguments):
    return [sys.executable, "-m", "workbench.cli.main", "train", *arguments]


def _start(out, *settings):
    options = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    return subprocess.Popen(
        _command(*options, "--out", str(out)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def _await_checkpoint(process, folder):
    deadline = time.monotonic() + 180
    while not list_checkpoints(folder):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _resume(folder, steps):
    """Continue a run until ``steps``, by lowering the steps of its Recipe first, and return the finished process."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_steps: 400", f"max_steps: {steps}"))
    return subprocess.run(
        _command("--resume", str(folder), "--json"), capture_output=True, text=True, timeout=300, env=ENVIRONMENT
    )


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path):
    folder = tmp_path / "run"
    process = _start(folder)
    try:
        _await_checkpoint(process, folder)
        assert summarise_run(folder).state == "running"
        busy = subprocess.run(_command("--resume", str(folder)), capture_output=True, text=True, timeout=120)
        assert busy.returncode != 0
        assert f"in use by process {process.pid}" in busy.stderr
        assert "Traceback" not in busy.stderr
    finally:
        process.kill()
        process.communicate()
    assert summarise_run(folder).state == "failed"
    step = int(list_checkpoints(folder)[-1].name.removeprefix("step-"))
    before = History.from_folder(folder)
    done = _resume(folder, step + 4)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_steps_done"] == step + 4
    after = History.from_folder(folder)
    assert after.column("step").tolist() == list(range(1, step + 5))
    assert after.column("loss")[:step].tolist() == before.column("loss")[:step].tolist()
    assert summarise_run(folder).state == "done"
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_a_step_border_and_saves(tmp_path, number):
    folder = tmp_path / "run"
    process = _start(folder)
    try:
        _await_checkpoint(process, folder)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    summary = summarise_run(folder)
    assert summary.state == "stopped"
    last = list_checkpoints(folder)[-1]
    assert last.name == f"step-{summary.num_steps_done:06d}"
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


def test_a_folder_that_holds_a_run_is_refused_in_one_message(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    process = _start(tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "already holds a run" in errors
    assert "Traceback" not in errors
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path):
    """A file size limit of the system stands in for a full disk: writes beyond it fail with an OSError."""
    folder = tmp_path / "run"
    limit = (
        "import resource, signal, sys, runpy\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from workbench.components import tiny_llama; tiny_llama.prepare()\n"
        "from workbench.train import resumable as engine\n"
        "original = engine.save_weights\n"
        "def save(model, path, **options):\n"
        "    if 'step-000010' in str(path):\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "    return original(model, path, **options)\n"
        "engine.save_weights = save\n"
        "from workbench.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    options = [word for setting in SETTINGS for word in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-c", limit, "train", *options, "--out", str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env=ENVIRONMENT,
    )
    assert done.returncode != 0
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in list_checkpoints(folder)] == ["step-000005"]
    assert not [path for path in (folder / "checkpoints").iterdir() if path.name != "step-000005"]
