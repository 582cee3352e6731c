"""Runs in canifinetune's environment: descriptions of runs on stdin, ``{id: figure}`` on stdout."""

import sys

from answering import answer_all

# This file bears the package's name: its own folder must not come first on the path.
sys.path.pop(0)

from canifinetune.estimator import EstimateRequest, estimate

GIB = 2**30
SCOPES = {
    frozenset(("q_proj", "k_proj", "v_proj", "o_proj")): "attention",
    frozenset(("q_proj", "v_proj")): "conservative",
    frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")): "all_linear",
    frozenset(("all-linear",)): "all_linear",
}
OPTIMIZERS = {
    "adamw_torch": "adamw_torch",
    "adamw_torch_fused": "adamw_torch_fused",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "sgd": "sgd",
}


def figure(run):
    """Return canifinetune's figures in bytes for one run, or why it has none."""
    scope = "attention"
    if run["method"] != "full":
        scope = SCOPES.get(frozenset(run["lora_targets"]))
        if scope is None:
            return {"reason": f"it knows no set of LoRA targets {', '.join(run['lora_targets'])}"}
    if run["optimizer"] not in OPTIMIZERS:
        return {"reason": f"it knows no optimizer {run['optimizer']}"}
    override = {**run["architecture"], "family": run["config"]["model_type"], "total_params": run["num_parameters"]}
    request = EstimateRequest(
        model_id=run["model_id"],
        method=run["method"],
        seq_len=run["length"],
        micro_batch_size=run["batch_size"],
        base_dtype=run["dtype"],
        quantization="nf4_double_quant" if run["double_quant"] else "nf4",
        lora_rank=run["lora_r"],
        lora_target_scope=scope,
        optimizer=OPTIMIZERS[run["optimizer"]],
        gradient_checkpointing=run["checkpointing"],
        attention_implementation=run["attention"],
        gpu_vram_gb=run["capacity_gib"],
        override=override,
        use_network=False,
    )
    answer = estimate(request)
    total = (answer.memory.total_estimated_gb - answer.memory.safety_margin_gb) * GIB
    return {"num_bytes": {"reserved": round(total)}, "fits": answer.feasible == "yes"}


if __name__ == "__main__":
    answer_all(figure)
