"""Runs in our own environment: accelerate's ``calculate_maximum_sizes`` on a meta model, as estimate-memory does."""

import json
import sys

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


def main():
    """Answer every run."""
    figures = {}
    for run in json.load(sys.stdin):
        try:
            figures[run["id"]] = figure(run)
        except Exception as error:
            figures[run["id"]] = {"reason": f"{type(error).__name__}: {str(error)[:160]}"}
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    main()
