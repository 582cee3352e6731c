"""The engines' own files, as text: accelerate's YAML, DeepSpeed's JSON, a Ray Train job, a SkyPilot task.

They can be read, changed and used without the workbench's ``launch``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from ..estimate.layout import CUTS
from ..estimate.sharded_tape import DEEPSPEED_BUCKET_ELEMENTS
from ..recipe import Recipe

PORT = 29500
# A machine that is taken away comes back, or another one does; so often in a row is taken for a fault of the run.
MAX_RESTARTS = 3


def accelerate_config(recipe: Recipe) -> str:
    """Return accelerate's configuration file for a layout of DDP or FSDP2.

    Precision stays ``no``: the workbench enters autocast itself, and accelerate's would keep a float32 copy of logits.

    Source:
        ``ClusterConfig``, accelerate/commands/config/config_args.py; FSDP's keys, docs of accelerate 1.15, "FSDP".
    """
    sharding = recipe.sharding
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        # Also for CPUs: this type starts the processes with torchrun, MULTI_CPU starts one unless there is MPI. Where
        # they compute is decided by hardware.device.
        "distributed_type": "MULTI_GPU",
        "use_cpu": False,
        "mixed_precision": "no",
        "num_processes": sharding.num_processes,
        "num_machines": sharding.num_machines,
        "machine_rank": 0,
        "main_process_ip": "127.0.0.1" if sharding.num_machines == 1 else "MAIN_MACHINE",
        "main_process_port": PORT,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
    }
    if sharding.layout in ("fsdp", "hybrid"):
        values["distributed_type"] = "FSDP"
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": False,
            "fsdp_activation_checkpointing": False,
        }
    if sharding.layout == "hybrid":
        values["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": sharding.num_machines,
            "parallelism_config_dp_shard_size": sharding.num_processes // sharding.num_machines,
        }
    return yaml.safe_dump(values, sort_keys=False)


def deepspeed_config(recipe: Recipe) -> str:
    """Return DeepSpeed's JSON for a ZeRO layout; buckets are those the estimate counts.

    Source:
        https://www.deepspeed.ai/docs/config-json, "ZeRO Optimizations".
    """
    training, layout = recipe.training, recipe.sharding.layout
    stage = int(layout.removeprefix("zero")) if layout.startswith("zero") else 0
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": DEEPSPEED_BUCKET_ELEMENTS,
        "allgather_bucket_size": DEEPSPEED_BUCKET_ELEMENTS,
    }
    if "parameter" in CUTS[layout]:
        zero |= {
            "stage3_prefetch_bucket_size": DEEPSPEED_BUCKET_ELEMENTS,
            "stage3_param_persistence_threshold": 10_000,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    values = {
        "train_micro_batch_size_per_gpu": training.per_device_train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "train_batch_size": training.effective_batch_size * recipe.sharding.num_processes,
        "gradient_clipping": training.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }
    return json.dumps(values, indent=2) + "\n"


RAY_JOB = '''"""Ray Train: the run of this folder on a Ray cluster. Start with: python ray_job.py

Workers that are lost (a spot machine taken away) are replaced, and the run goes on from its last checkpoint.
RUN_DIR has to be on storage that all machines see.
"""

import os
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

RUN_DIR = Path(__file__).resolve().parent.parent


def train_one_rank(config):
    from workbench.cli.main import main

    code = main(["train", str(RUN_DIR / "recipe.yaml"), "--out", str(RUN_DIR), "--continue"])
    if code:
        raise RuntimeError(f"rank {{os.environ.get('RANK')}} ended with code {{code}}")


if __name__ == "__main__":
    ray.init(address=os.environ.get("RAY_ADDRESS"))
    trainer = TorchTrainer(
        train_one_rank,
        train_loop_config={{}},
        scaling_config=ScalingConfig(num_workers={num_workers}, use_gpu={use_gpu}),
        run_config=RunConfig(
            name="workbench",
            storage_path=str(RUN_DIR / "ranks" / "ray"),
            failure_config=FailureConfig(max_failures={max_failures}),
        ),
    )
    trainer.fit()
'''


def ray_job(recipe: Recipe, *, on_gpu: bool) -> str:
    """Return a Python file that runs the folder's Recipe as a Ray Train job."""
    return RAY_JOB.format(num_workers=recipe.sharding.num_processes, use_gpu=on_gpu, max_failures=MAX_RESTARTS)


def skypilot_task(recipe: Recipe, gpu: str, command: Sequence[str]) -> str:
    """Return a SkyPilot task on spot machines that are replaced, with checkpoints in a bucket.

    Source:
        https://docs.skypilot.co/en/latest/reference/yaml-spec.html; ``job_recovery`` under "Managed jobs".
    """
    sharding = recipe.sharding
    per_machine = max(1, sharding.num_processes // sharding.num_machines)
    values = {
        "name": "workbench",
        "num_nodes": sharding.num_machines,
        "resources": {
            "accelerators": f"{gpu}:{per_machine}",
            "use_spot": True,
            "job_recovery": {"strategy": "FAILOVER", "max_restarts_on_errors": MAX_RESTARTS},
        },
        "file_mounts": {"/checkpoints": {"name": "workbench-checkpoints", "mode": "MOUNT_CACHED"}},
        "workdir": ".",
        "setup": "pip install workbench",
        "run": "\n".join(
            [
                "mkdir -p /checkpoints/run",
                "[ -f /checkpoints/run/recipe.yaml ] || cp recipe.yaml /checkpoints/run/recipe.yaml",
                'MAIN=$(echo "$SKYPILOT_NODE_IPS" | head -n1)',
                " ".join(command),
            ]
        ),
    }
    return yaml.safe_dump(values, sort_keys=False, width=110)
