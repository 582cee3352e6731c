"""Runs in fitcheck-llm's environment: descriptions of runs on stdin, ``{id: figure}`` on stdout."""

from answering import answer_all
from fitcheck.config_parser import ModelConfig
from fitcheck.estimator import TrainingConfig, estimate
from fitcheck.gpu_db import GpuSpec, get_gpu

MIB = 2**20
GPUS = {
    "Tesla T4": "t4",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A10G": "a10",
    "NVIDIA L40S": "l40s",
    "Tesla V100-16GB": "v100-16",
}
KNOWN_TARGETS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def figure(run):
    """Return fitcheck's figures in bytes for one run, or why it has none."""
    if not set(run["lora_targets"]) <= KNOWN_TARGETS and run["method"] != "full":
        return {"reason": f"it knows no LoRA target {', '.join(sorted(set(run['lora_targets']) - KNOWN_TARGETS))}"}
    if run["num_parameters"] is None:
        return {"reason": "it needs the number of parameters of a model with gated layers"}
    names = {"num_hidden_layers": "num_layers", "num_key_value_heads": "num_kv_heads"}
    shape = {names.get(name, name): value for name, value in run["architecture"].items()}
    model = ModelConfig(name=run["model_id"], num_params=run["num_parameters"], **shape)
    optimizer = {"adamw_bnb_8bit": "adam8bit", "paged_adamw_8bit": "adam8bit", "sgd": "sgd"}.get(
        run["optimizer"], "adamw"
    )
    if run["optimizer"] == "adafactor":
        return {"reason": "it knows no Adafactor"}
    training = TrainingConfig(
        precision=run["dtype"],
        quantization="nf4" if run["method"] == "qlora" else "none",
        double_quant=run["double_quant"] and run["method"] == "qlora",
        optimizer=optimizer,
        batch_size=run["batch_size"],
        seq_len=run["length"],
        lora_rank=None if run["method"] == "full" else run["lora_r"],
        lora_targets=[] if run["method"] == "full" else run["lora_targets"],
        grad_checkpoint=run["checkpointing"],
        flash_attn=run["attention"] != "eager",
    )
    capacity = int(run["capacity_gib"] * 1024)
    gpu = get_gpu(GPUS[run["device"]]) if run["device"] in GPUS else GpuSpec(run["device"], capacity, capacity)
    report = estimate(model, training, gpu)
    tensors = report.total_mib - report.overhead_mib
    return {
        "num_bytes": {"process": round(report.total_mib * MIB), "allocated": round(tensors * MIB)},
        "fits": report.verdict == "safe",
    }


if __name__ == "__main__":
    answer_all(figure)
