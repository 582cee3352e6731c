"""Runs in ftuneai's environment: descriptions of runs on stdin, ``{id: figure}`` on stdout."""

import sys

from answering import answer_all

# This file bears the package's name: its own folder must not come first on the path.
sys.path.pop(0)

from ftuneai.core.memory import MemoryEstimator
from ftuneai.core.models import FineTuneMethod, LoRATarget, ModelSpec, OptimizerType, TrainingConfig
from ftuneai.hub import _estimate_param_count

GIB = 2**30
TARGETS = {
    frozenset(("q_proj", "k_proj", "v_proj", "o_proj")): LoRATarget.ATTENTION_ALL,
    frozenset(("q_proj", "v_proj")): LoRATarget.ATTENTION,
    frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")): LoRATarget.ALL_LINEAR,
    frozenset(("all-linear",)): LoRATarget.ALL_LINEAR,
}
OPTIMIZERS = {
    "adamw_bnb_8bit": OptimizerType.ADAM_8BIT,
    "paged_adamw_8bit": OptimizerType.ADAM_8BIT,
    "adafactor": OptimizerType.ADAFACTOR,
    "sgd": OptimizerType.SGD,
}
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def figure(run):
    """Return ftuneai's figures in bytes for one run, or why it has none."""
    target = LoRATarget.ATTENTION
    if run["method"] != "full":
        target = TARGETS.get(frozenset(run["lora_targets"]))
        if target is None:
            return {"reason": f"it knows no set of LoRA targets {', '.join(run['lora_targets'])}"}
    shape = run["architecture"]
    spec = ModelSpec(
        name=run["model_id"],
        parameters=run["num_parameters"] or _estimate_param_count(run["config"]),
        hidden_size=shape["hidden_size"],
        num_layers=shape["num_hidden_layers"],
        num_attention_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        intermediate_size=shape["intermediate_size"],
        vocab_size=shape["vocab_size"],
        max_seq_length=run["config"].get("max_position_embeddings") or 1 << 20,
        default_dtype=DTYPES[run["dtype"]],
    )
    config = TrainingConfig(
        model=run["model_id"],
        method=FineTuneMethod(run["method"]),
        batch_size=run["batch_size"],
        seq_length=run["length"],
        gradient_checkpointing=run["checkpointing"],
        optimizer=OPTIMIZERS.get(run["optimizer"], OptimizerType.ADAMW),
        lora_rank=run["lora_r"],
        lora_target=target,
        flash_attention=run["attention"] != "eager",
    )
    total = MemoryEstimator(spec, config).estimate().total_gb * GIB
    return {"num_bytes": {"process": round(total)}, "fits": total <= run["capacity_gib"] * GIB}


if __name__ == "__main__":
    answer_all(figure)
