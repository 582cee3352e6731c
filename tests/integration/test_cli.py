"""The command line as a user meets it: in its own process, with the real stages behind it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

QUICK = [
    "--model.name_or_path=tiny-llama",
    "--data.max_length=128",
    "--data.max_rows=200",
    "--evaluation.max_rows=8",
    "--evaluation.eval_steps=0",
    "--training.gradient_accumulation_steps=1",
    "--hardware.device=cpu",
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "workbench.cli.main", *arguments]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, cwd=cwd, timeout=300)


def test_estimate_prints_nested_json_for_a_folder_with_only_a_config(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{name_or_path: {folder}}}\n")
    done = run("estimate", str(recipe), "--device", "Tesla T4", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    memory, step_time = printed["memory"], printed["time"]
    assert memory["verdict"] == "fits" and memory["fits"] is True
    assert memory["peak_allocated_bytes"] <= memory["peak_reserved_bytes"] <= memory["process_bytes"]
    assert memory["process_bytes"] < memory["capacity_bytes"]
    assert memory["interval_bytes"][0] <= memory["process_bytes"] <= memory["interval_bytes"][1]
    assert sum(memory["breakdown"].values()) == memory["process_bytes"]
    assert memory["peak_phase"]
    assert memory["peak_allocated_bytes"] < memory["smallest_capacity_bytes"] <= memory["process_bytes"]
    assert memory["fragmentation_bytes"] == 0 or memory["fragmentation_cause"]
    assert step_time["step_s"] > 0 and step_time["tokens_per_s"] > 0
    assert printed["elapsed_s"] > 0


def test_a_gated_model_of_the_catalogue_is_estimated_offline_and_does_not_fit_in_full(tmp_path: Path) -> None:
    done = run(
        "estimate",
        "--model.name_or_path=meta-llama/Llama-3.1-8B",
        "--adapter.method=none",
        "--device=Tesla T4",
        "--json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)["memory"]
    assert memory["verdict"] == "does_not_fit" and memory["fits"] is False


def test_plan_says_what_each_toggle_changes(tmp_path: Path) -> None:
    done = run("plan", *QUICK, "--device=Tesla T4", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    effects = {(effect["field"], str(effect["value"])): effect for effect in json.loads(done.stdout)["effects"]}
    assert any(field == "training.gradient_checkpointing" for field, _ in effects)
    assert all("memory_delta_bytes" in effect for effect in effects.values())


def test_train_then_resume_then_list(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = [*QUICK, "--training.save_steps=3"]
    done = run("train", *arguments, "--training.max_steps=6", "--out", str(out), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["state"] == "done" and summary["num_steps_done"] == 6
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    loads = (
        "import sys; from peft import PeftConfig; "
        "assert PeftConfig.from_pretrained(sys.argv[1]).r == 16; print('loaded')"
    )
    fresh = subprocess.run([sys.executable, "-c", loads, str(out / "adapter")], capture_output=True, text=True)
    assert "loaded" in fresh.stdout, fresh.stderr
    listed = run("runs", str(tmp_path), "--json", cwd=tmp_path)
    assert [row["state"] for row in json.loads(listed.stdout)] == ["done"]


def test_interrupting_saves_and_resume_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        command("train", *QUICK, "--training.max_steps=100000", "--training.save_steps=0", "--out", str(out)),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.is_file() and metrics.read_text().count("\n") >= 3):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopped after" in output
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    assert list((out / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["estimate", "--model.name_or_path=/nowhere/at-all"], 1, "/nowhere/at-all"),
        (["train", "--model.name_or_path=tiny-llama", "--data.name_or_path=missing.jsonl"], 1, "missing.jsonl"),
        (["train", "--model.name_or_path=meta-llama/Llama-3.1-8B"], 1, "hub does not answer"),
        (["train", *QUICK, "--adapter.target_modules=no_such_proj"], 1, "no_such_proj"),
        (["train", "--resume", "nothing-here"], 1, "nothing-here"),
        (["estimate", "--device", "abacus"], 1, "not in the device table"),
        (["estimate", "--device=Tesla T4", "--training.mixed_precision=bf16"], 2, "training.mixed_precision=fp16"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_input_is_one_clear_message_without_a_traceback(
    arguments: list[str], code: int, message: str, tmp_path: Path
) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
