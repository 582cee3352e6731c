"""Every technique in a real run of the built-in tiny model on real text: it trains, saves, and loads again."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap

import pytest
import torch

from workbench.observe.recorder import Recorder
from workbench.recipe import Recipe
from workbench.recipe.parts import OPTIMIZERS
from workbench.train.session import Session

SMALL = {
    "model.name_or_path": "tiny-llama",
    "data.max_length": 96,
    "data.max_rows": 90,
    "training.max_steps": 4,
    "training.per_device_train_batch_size": 4,
    "training.gradient_accumulation_steps": 2,
    "training.learning_rate": 5e-3,
    "evaluation.max_rows": 8,
}

TECHNIQUES = {
    "lora": {},
    "all weights": {"adapter.method": "none"},
    "bottleneck": {"adapter.method": "bottleneck", "adapter.bottleneck_size": 8},
    "4-bit": {"quantization.load_in_4bit": True, "quantization.bnb_4bit_use_double_quant": True},
    "8-bit": {"quantization.load_in_8bit": True},
    "4-bit, norms in 16 bits": {
        "quantization.load_in_4bit": True,
        "quantization.prepare_model_for_kbit_training": False,
        "model.dtype": "bfloat16",
    },
    "checkpointing": {"training.gradient_checkpointing": True},
    "checkpointing, 4-bit": {"training.gradient_checkpointing": True, "quantization.load_in_4bit": True},
    "packing": {"data.packing": True},
    "packing, checkpointing, all weights": {
        "data.packing": True,
        "training.gradient_checkpointing": True,
        "adapter.method": "none",
    },
    "bf16 autocast": {"training.mixed_precision": "bf16"},
    "bf16 autocast, all weights": {"training.mixed_precision": "bf16", "adapter.method": "none"},
    "chunked loss": {"training.loss_type": "chunked_nll"},
    "chunked loss, packing, bf16": {
        "training.loss_type": "chunked_nll",
        "data.packing": True,
        "training.mixed_precision": "bf16",
    },
    "grouped by length": {"data.group_by_length": True},
    "padded to max_length": {"data.padding": "max_length"},
    "dora": {"adapter.use_dora": True, "adapter.use_rslora": True},
    "one layer": {"adapter.layers_to_transform": [2], "adapter.target_modules": ["q_proj", "v_proj"]},
    "eager attention": {"model.attn_implementation": "eager"},
    "loader workers": {"data.dataloader_num_workers": 1},
} | {
    f"optimizer {name}": {"training.optim": name, "adapter.method": "none" if name == "galore_adamw" else "lora"}
    for name in OPTIMIZERS
    if name != "adamw_torch_fused"
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _train(changes, folder):
    session = Session(Recipe().with_changes({**SMALL, **changes}), run_dir=folder)
    recorder = Recorder(folder)
    session.add_observer(recorder)
    session.start().wait(240)
    assert session.state == "done"
    return session, recorder.history


@pytest.mark.parametrize("name", TECHNIQUES)
def test_each_technique_trains_and_saves(tmp_path, name):
    session, history = _train(TECHNIQUES[name], tmp_path / "run")
    losses = history.column("loss")
    assert len(losses) == 4
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] == pytest.approx(math.log(1024), abs=0.4)  # Random weights: as good as guessing.
    # The first step is drawn from the same rows for every technique; a held-out loss below it shows learning.
    if name not in ("one layer", "optimizer sgd", "optimizer lion_8bit"):
        assert history.last("eval_loss") < losses[0]
    assert session.result_dir.name == ("model" if TECHNIQUES[name].get("adapter.method") == "none" else "adapter")


def test_techniques_that_change_only_memory_compute_the_same(tmp_path):
    _, plain = _train({}, tmp_path / "plain")
    for name in ("checkpointing", "chunked loss"):
        _, other = _train(TECHNIQUES[name], tmp_path / name.replace(" ", "-"))
        for column in ("loss", "grad_norm"):
            assert other.column(column) == pytest.approx(plain.column(column), rel=2e-4), (name, column)


def test_packing_and_padding_learn_from_the_same_tokens(tmp_path):
    """One epoch over the same rows: packing moves samples between sequences, not in or out of the loss."""
    whole = {"training.max_steps": -1, "data.max_rows": 40, "data.max_length": 512, "evaluation.split": "none"}
    _, padded = _train(whole, tmp_path / "padded")
    _, packed = _train({**whole, "data.packing": True}, tmp_path / "packed")
    for column in ("num_tokens", "num_supervised_tokens"):
        assert packed.column(column).sum() == padded.column(column).sum()
    paddings = [history.column("num_padding_tokens").sum() for history in (padded, packed)]
    assert paddings[1] < 0.3 * paddings[0]


@pytest.mark.parametrize("method", ["lora", "none", "bottleneck"])
def test_the_result_loads_in_a_fresh_process_with_its_tokenizer(tmp_path, method):
    session, history = _train({"adapter.method": method}, tmp_path / "run")
    loaders = {
        "lora": "import peft; model = peft.AutoPeftModelForCausalLM.from_pretrained(folder)",
        "none": "import transformers; model = transformers.AutoModelForCausalLM.from_pretrained(folder)",
        "bottleneck": "from workbench.export import load_trained; model, _ = load_trained(folder)",
    }
    code = f"""
        import json, torch
        from transformers import AutoTokenizer
        from workbench.components.collator import build_collator
        from workbench.components.data import prepare_data
        from workbench.components.loss import compute_loss
        from workbench.train.run_folder import read_recipe_of
        folder = {str(session.result_dir)!r}
        recipe = read_recipe_of({str(session.run_dir)!r})
        tokenizer = AutoTokenizer.from_pretrained(folder)
        {loaders[method]}
        model.eval()
        rows = prepare_data(recipe, tokenizer).evaluation
        batch = build_collator(recipe, tokenizer)(list(rows))
        with torch.no_grad():
            print(json.dumps(float(compute_loss(recipe, model, batch, None))))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(history.last("eval_loss"), rel=1e-4)


def test_the_same_run_twice_is_equal_to_the_bit(tmp_path):
    changes = {"adapter.lora_dropout": 0.1, "data.group_by_length": True}
    _, first = _train(changes, tmp_path / "first")
    _, second = _train(changes, tmp_path / "second")
    assert first.column("loss").tolist() == second.column("loss").tolist()
    assert first.column("grad_norm").tolist() == second.column("grad_norm").tolist()
