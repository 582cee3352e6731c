"""``workbench compare --train``: real runs, one folder each, in one table beside their estimates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_variants_are_trained_and_tabled(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "workbench.cli.main", "compare", "--over", "adapter.r=2,32", "--train", "--json",
        "--out", str(tmp_path), "--model.name_or_path=tiny-llama", "--data.max_rows=24", "--data.max_length=64",
        "--training.max_steps=3", "--evaluation.max_rows=4", "--cost.price_per_hour_usd=1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == ["adapter.r=2", "adapter.r=32"]
    for row in rows:
        assert row["problem"] is None
        assert row["measured"]["step_s"] > 0 and row["measured"]["eval_loss"] > 0
        assert row["measured"]["cost_usd_per_1000_tokens"][0] > 0
        assert (Path(row["measured"]["run_dir"]) / "adapter" / "adapter_model.safetensors").is_file()
    trainable = [row["estimate"]["num_trainable_parameters"] for row in rows]
    assert trainable[1] == 16 * trainable[0]
