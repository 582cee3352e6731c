"""Step time on this CPU: predicted after a calibration, then measured, for 30 configurations.

Run: ``python -m benchmarks.cpu_step_time [--threads 1] [--only TEXT] [--json]``, about three minutes on one core.

The device is calibrated first (under 10 s); nothing else that is measured here reaches the prediction. With one thread
time is the process's own CPU time, so that other work on the machine disturbs neither side; with more it is the wall
clock, and the machine should be idle. A row is the shortest of its steps after a first one that makes the optimizer's
state.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from typing import Any

from benchmarks.steps import Configuration

MEDIAN_BOUND = 0.15
MEASURE_S = 1.0
MAX_STEPS = 12

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "dtype": "float32",
}
_WIDE = {**_LLAMA, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2, "num_attention_heads": 16}
_THIN = {**_LLAMA, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 12, "num_key_value_heads": 8}
_QWEN = {**_LLAMA, "model_type": "qwen2", "hidden_size": 256, "vocab_size": 50304, "tie_word_embeddings": True}
_GEMMA = {**_LLAMA, "model_type": "gemma2", "hidden_size": 384, "intermediate_size": 1152, "head_dim": 64}
_GPT2 = {"model_type": "gpt2", "n_embd": 384, "n_layer": 4, "n_head": 6, "vocab_size": 8192, "dtype": "float32"}
_GPT2 |= {"bos_token_id": 0, "eos_token_id": 1}
_PHI = {**_LLAMA, "model_type": "phi", "hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 6}
_NEOX = {**_PHI, "model_type": "gpt_neox"}
_MISTRAL = {**_LLAMA, "model_type": "mistral", "sliding_window": 64, "num_hidden_layers": 3}
_OPT = {
    "model_type": "opt",
    "hidden_size": 256,
    "word_embed_proj_dim": 256,
    "ffn_dim": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 8192,
    "dtype": "float32",
}
_WHOLE = {"adapter.method": "none"}
_FOUR = {"quantization.load_in_4bit": True}
_EIGHT = {"quantization.load_in_8bit": True}
_SAVES = {"training.gradient_checkpointing": True}

CONFIGURATIONS = (
    Configuration("tiny-llama lora", "tiny-llama", {}, 2, 64),
    Configuration("tiny-llama full", "tiny-llama", _WHOLE, 4, 128),
    Configuration("tiny-llama full checkpointing", "tiny-llama", {**_WHOLE, **_SAVES}, 4, 128),
    Configuration("tiny-llama 8-bit adamw", "tiny-llama", {**_WHOLE, "training.optim": "adamw_bnb_8bit"}, 2, 64),
    Configuration("smollm2 lora", "smollm2-135m-instruct", {}, 2, 96),
    Configuration("smollm2 lora checkpointing", "smollm2-135m-instruct", _SAVES, 2, 96),
    Configuration("smollm2 lora nf4", "smollm2-135m-instruct", _FOUR, 1, 128),
    Configuration("smollm2 full", "smollm2-135m-instruct", _WHOLE, 1, 128),
    Configuration("llama lora", _LLAMA, {}, 2, 256),
    Configuration("llama lora dropout", _LLAMA, {"adapter.lora_dropout": 0.1}, 2, 256),
    Configuration("llama lora dora", _LLAMA, {"adapter.use_dora": True}, 2, 128),
    Configuration("llama lora eager", _LLAMA, {"model.attn_implementation": "eager"}, 2, 256),
    Configuration("llama lora accumulation", _LLAMA, {"training.gradient_accumulation_steps": 4}, 1, 128),
    Configuration("llama lora nf4", _LLAMA, _FOUR, 2, 256),
    Configuration("llama lora nf4 checkpointing", _LLAMA, {**_FOUR, **_SAVES}, 1, 256),
    Configuration("llama lora int8", _LLAMA, _EIGHT, 2, 128),
    Configuration("llama lora long", _LLAMA, {}, 1, 1024),
    Configuration("llama lora bf16", _LLAMA, {"training.mixed_precision": "bf16"}, 1, 32),
    Configuration("llama full", _LLAMA, _WHOLE, 2, 256),
    Configuration("llama full foreach", _LLAMA, {**_WHOLE, "training.optim": "adamw_torch"}, 2, 64),
    Configuration("llama full adafactor", _LLAMA, {**_WHOLE, "training.optim": "adafactor"}, 2, 64),
    Configuration("llama full sgd", _LLAMA, {**_WHOLE, "training.optim": "sgd"}, 2, 64),
    Configuration("llama wide full", _WIDE, _WHOLE, 1, 256),
    Configuration("llama thin full", _THIN, _WHOLE, 4, 128),
    Configuration("qwen2 vocabulary full", _QWEN, _WHOLE, 1, 256),
    Configuration("qwen2 vocabulary chunked", _QWEN, {"training.loss_type": "chunked_nll"}, 1, 256),
    Configuration("gemma2 lora", _GEMMA, {}, 2, 128),
    Configuration("gpt2 full", _GPT2, _WHOLE, 2, 128),
    Configuration("phi lora", _PHI, {}, 2, 128),
    Configuration("gpt_neox full", _NEOX, _WHOLE, 2, 128),
    Configuration("mistral window lora", _MISTRAL, {}, 1, 256),
    Configuration("opt full", _OPT, _WHOLE, 4, 64),
)


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 when the median error is above its bound."""
    options = _parser().parse_args(argv)
    import torch

    torch.set_num_threads(options.threads)
    from workbench.hardware import calibrate_device

    began = time.perf_counter()
    device = calibrate_device(kind="cpu")
    calibration_s = time.perf_counter() - began
    rows = []
    for item in CONFIGURATIONS:
        if options.only in item.name:
            rows.append(measure(item, device, options.threads))
            if not options.json:
                print(_line(rows[-1]), flush=True)
    errors = [abs(row["error"]) for row in rows]
    median, worst = statistics.median(errors), max(rows, key=lambda row: abs(row["error"]))
    if options.json:
        print(json.dumps({"device": device.name, "calibration_s": calibration_s, "rows": rows}))
    else:
        print(f"{device.name}, {options.threads} thread(s), calibrated in {calibration_s:.1f} s; {len(rows)} rows")
        print(f"median error {median:.1%}, worst {worst['error']:+.1%} ({worst['name']})")
    return 1 if median > MEDIAN_BOUND else 0


def measure(item: Configuration, device: Any, num_threads: int) -> dict[str, Any]:
    """Predict and measure one configuration; returns its row."""
    from benchmarks.steps import Steps
    from workbench.estimate import estimate_run

    recipe = item.recipe()
    estimate = estimate_run(recipe, device, shape=item.shape())
    steps = Steps(recipe, device, "cpu")
    clock = time.process_time if num_threads == 1 else time.perf_counter
    first = steps.run(1, clock)[0]
    count = min(MAX_STEPS, max(2, round(MEASURE_S / first)))
    measured = min(steps.run(count, clock))
    del steps
    gc.collect()
    return {
        "name": item.name,
        "predicted_s": estimate.time.step_s,
        "measured_s": measured,
        "error": estimate.time.step_s / measured - 1,
        "seconds_by_class": dict(estimate.time.seconds_by_class),
    }


def _line(row: dict[str, Any]) -> str:
    parts = sorted(row["seconds_by_class"].items(), key=lambda part: -part[1])[:3]
    shares = ", ".join(f"{name} {seconds / row['predicted_s']:.0%}" for name, seconds in parts)
    return (
        f"{row['name']:30} predicted {row['predicted_s'] * 1e3:8.1f} ms, measured {row['measured_s'] * 1e3:8.1f} ms, "
        f"{row['error']:+7.1%}  ({shares})"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.cpu_step_time", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--only", default="", help="only configurations whose name holds this text")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
