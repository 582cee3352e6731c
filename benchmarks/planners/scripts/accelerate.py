"""Runs in our own environment: accelerate's ``calculate_maximum_sizes`` on a meta model, as estimate-memory does."""

import sys

from answering import answer_all

# This file bears the package's name: its own folder must not come first on the path.
sys.path.pop(0)

import torch
from accelerate import init_empty_weights
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_TOTALS: dict = {}


def figure(run):
    """Return "training with Adam" in bytes, or why there is none."""
    if run["method"] != "full":
        return {"reason": "it knows no adapters and no frozen weights"}
    key = run["model_id"]
    if key not in _TOTALS:
        fields = dict(run["config"])
        config = CONFIG_MAPPING[fields.pop("model_type")].from_dict(fields)
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.tie_weights()
        _TOTALS[key] = calculate_maximum_sizes(model)[0]
    total = estimate_training_usage(_TOTALS[key], DTYPES[run["dtype"]])["step"]
    return {"num_bytes": {"allocated": total}, "fits": total <= run["capacity_gib"] * 2**30}


if __name__ == "__main__":
    answer_all(figure)
