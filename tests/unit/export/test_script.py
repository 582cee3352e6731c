"""The script of a run: valid Python for every setting it takes, and a clear refusal of those it cannot repeat."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from workbench.errors import ExportError
from workbench.export.script import _require_plain, _stored_order, render_script
from workbench.hardware import find_device
from workbench.recipe import Recipe, field_info
from workbench.recipe.parts import OPTIMIZERS

SOURCE: Any = SimpleNamespace(
    name="org/model", kind="hub", path="/cache/x", revision=None, config=SimpleNamespace(dtype="bfloat16")
)


def render(changes: dict[str, Any], device: str = "A100 80GB") -> str:
    recipe = Recipe().with_changes(changes)
    return render_script(recipe, SOURCE, find_device(device), 2, 100, stored_order=recipe.data.group_by_length)


@pytest.mark.parametrize("optim", [name for name in OPTIMIZERS if name != "galore_adamw"])
def test_every_optimizer_is_valid_python(optim: str) -> None:
    text = render({"training.optim": optim, "adapter.method": "none"})
    ast.parse(text)
    assert ("import bitsandbytes" in text) == ("bit" in optim)


@pytest.mark.parametrize("schedule", field_info("training.lr_scheduler_type").choices)
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_schedules_and_quantized_bases_are_valid_python(schedule: str, bits: int) -> None:
    changes: dict[str, Any] = {"training.lr_scheduler_type": schedule, "training.gradient_checkpointing": True}
    if bits:
        changes[f"quantization.load_in_{bits}bit"] = True
    text = render(changes)
    ast.parse(text)
    assert ("prepare_model_for_kbit_training" in text) == bool(bits)


def test_dtypes_are_those_of_the_device() -> None:
    assert "AUTOCAST_DTYPE = 'bfloat16'" in render({})
    assert "AUTOCAST_DTYPE = 'float16'" in render({}, "Tesla T4")
    assert "WEIGHT_DTYPE = 'float32'" in render({"adapter.method": "none"})


def test_an_order_that_is_no_plain_shuffle_is_written_down() -> None:
    data: Any = SimpleNamespace(train=Dataset.from_dict({"length": [5] * 15 + [90]}))

    def order(sampling: str) -> Any:
        changes = {"data.sampling": sampling, "training.num_train_epochs": 3.0}
        return _stored_order(Recipe().with_changes(changes), data)

    assert order("uniform") is None
    stored = order("balanced_length")
    assert stored.shape == (3, 16)
    assert (stored == 15).mean() > 0.2


def test_names_cannot_become_code() -> None:
    text = render({"model.name_or_path": "x'); import os #", "adapter.target_modules": ['q"""']})
    tree = ast.parse(text)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "os" not in imported


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training.activation_storage": "8bit"}, "activation_storage=8bit"),
        ({"model.task": "sequence-classification"}, "causal language models"),
        ({"sharding.num_processes": 2}, "several devices"),
        ({"policies.on_spike": "skip"}, "on_spike=skip"),
        ({"policies.batch": "noise_scale"}, "batch=noise_scale"),
        ({"training.optim": "galore_adamw", "adapter.method": "none"}, "galore_adamw"),
    ],
)
def test_what_a_plain_script_cannot_do_is_said(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ExportError, match=words):
        _require_plain(Recipe().with_changes(changes))
