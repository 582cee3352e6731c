"""A plain script that repeats a run with torch, transformers and PEFT alone.

The tokens go with it, so that templates, splits and packing need no second implementation; the order of the samples is
the run's own, drawn again from the seed. On a CPU without dropout its losses are the run's to the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

from ..components.collator import build_collator
from ..components.data import PreparedData, prepare_data
from ..components.model import load_weight_dtype, resolve_precision
from ..components.source import ModelSource, find_source, load_tokenizer
from ..components.task import CAUSAL
from ..errors import ExportError
from ..events import Cancel, Progress, ProgressCallback
from ..hardware import Device, read_device
from ..recipe import Recipe
from ..train.arguments import count_steps
from ..train.sampler import sampler_of

TEMPLATE = Path(__file__).with_name("script_template.txt")


def write_script(
    recipe: Recipe, target: Path, *, progress: ProgressCallback | None = None, cancel: Cancel | None = None
) -> None:
    """Write ``train.py``, ``train.parquet``, ``requirements.txt`` and, where the order cannot be drawn, ``order.npy``.

    Args:
        recipe: The run's settings.
        target: An existing, empty folder.
        progress: Told about the stages ``"tokenize"`` and ``"export"``.
        cancel: Ends the work.

    Raises:
        ExportError: The Recipe uses something that no plain script can do.
    """
    _require_plain(recipe)
    device = read_device(recipe.hardware.device)
    source = find_source(recipe, for_training=True, progress=progress, cancel=cancel)
    tokenizer = load_tokenizer(source)
    data = prepare_data(recipe, tokenizer, progress=progress, cancel=cancel)
    if progress is not None:
        progress(Progress("export", 1, 3, "Writing script and tokens"))
    pyarrow.parquet.write_table(data.train.data.table, target / "train.parquet")
    order = _stored_order(recipe, data)
    if order is not None:
        np.save(target / "order.npy", order)
    pad = build_collator(recipe, tokenizer).pad_token_id
    text = render_script(recipe, source, device, pad, len(data.train), stored_order=order is not None)
    (target / "train.py").write_text(text, encoding="utf-8")
    (target / "requirements.txt").write_text(_requirements(recipe), encoding="utf-8")


def render_script(
    recipe: Recipe, source: ModelSource, device: Device, pad_token_id: int, num_samples: int, *, stored_order: bool
) -> str:
    """Return the text of ``train.py``.

    Args:
        recipe: The settings.
        source: Where the model came from.
        device: The device of the run; it decided the dtypes.
        pad_token_id: What fills batches up.
        num_samples: Samples of the training set.
        stored_order: Whether ``order.npy`` holds the order of the samples.
    """
    training, precision = recipe.training, resolve_precision(recipe, device)
    model = source.name if source.kind == "hub" else str(source.path)
    autocast = None if precision.autocast_dtype is None else str(precision.autocast_dtype).removeprefix("torch.")
    constants: dict[str, Any] = {
        "MODEL": model,
        "REVISION": source.revision,
        "TRUST_REMOTE_CODE": recipe.model.trust_remote_code,
        "WEIGHT_DTYPE": str(load_weight_dtype(recipe, source, device)).removeprefix("torch."),
        "AUTOCAST_DTYPE": autocast,
        "ATTENTION": recipe.model.attn_implementation,
        "DEVICE": "cuda" if device.has_caching_allocator else "cpu",
        "SEED": training.seed,
        "PAD_TOKEN_ID": pad_token_id,
        "PAD_TO": recipe.data.max_length if recipe.data.padding == "max_length" and not recipe.data.packing else None,
        "BATCH_SIZE": training.per_device_train_batch_size,
        "ACCUMULATION": training.gradient_accumulation_steps,
        "NUM_STEPS": count_steps(recipe, num_samples),
        "LEARNING_RATE": training.learning_rate,
        "SCHEDULE": "constant_with_warmup" if training.lr_scheduler_type == "constant" else training.lr_scheduler_type,
        "WARMUP_STEPS": training.warmup_steps,
        "WEIGHT_DECAY": training.weight_decay,
        "MAX_GRAD_NORM": training.max_grad_norm,
        "TF32": training.tf32,
        "CHECKPOINTING": training.gradient_checkpointing,
    }
    return TEMPLATE.read_text(encoding="utf-8").format(
        constants="\n".join(f"{name} = {value!r}" for name, value in constants.items()),
        order=_STORED_ORDER if stored_order else _DRAWN_ORDER,
        quantization=_indent(_quantization(recipe, constants)),
        adapter=_indent(_adapter(recipe)),
        optimizer=_indent(_optimizer(recipe)),
        settings="\n".join(f"#   {line}" for line in recipe.to_yaml(only_changed=True).splitlines()),
    )


_DRAWN_ORDER = '''\
def sample_order(epoch):
    """The order of the samples is a function of seed and epoch alone."""
    generator = torch.Generator().manual_seed((SEED * 1_000_003 + epoch) % 2**63)
    return torch.randperm(len(samples), generator=generator).tolist()'''

_STORED_ORDER = '''\
order = np.load(HERE / "order.npy")


def sample_order(epoch):
    """The order of the samples in each epoch was written down: it was not a plain shuffle."""
    return order[epoch].tolist()'''


def _require_plain(recipe: Recipe) -> None:
    problems = []
    if recipe.model.task != CAUSAL:
        problems.append(f"model.task={recipe.model.task} (the script is for causal language models)")
    if recipe.adapter.name_or_path is not None:
        problems.append("adapter.name_or_path (the start lies in another folder)")
    if recipe.tasks.data:
        problems.append("several tasks (tasks.data)")
    if recipe.pruning.method != "none":
        problems.append("pruning (the workbench's own loop)")
    if recipe.model.new_tokens:
        problems.append("model.new_tokens")
    if recipe.adapter.method == "bottleneck":
        problems.append("adapter.method=bottleneck (PEFT has none)")
    if recipe.training.activation_storage in ("8bit", "4bit"):
        problems.append(f"training.activation_storage={recipe.training.activation_storage} (the workbench's own code)")
    if recipe.training.gradient_checkpointing_every > 1 or recipe.training.gradient_checkpointing_keep_first:
        problems.append("checkpointing of single layers")
    if recipe.training.optim == "galore_adamw":
        problems.append("training.optim=galore_adamw (the workbench's own code)")
    if recipe.policies.batch != "fixed":
        problems.append(f"policies.batch={recipe.policies.batch} (the workbench's own loop)")
    if recipe.policies.on_spike != "keep":
        problems.append(f"policies.on_spike={recipe.policies.on_spike} (the workbench's own loop)")
    if recipe.sharding.num_processes > 1:
        problems.append("several devices (workbench launch writes the files of an engine)")
    if problems:
        raise ExportError(f"A plain script cannot repeat {'; '.join(problems)}. Export adapter or merged instead.")


def _stored_order(recipe: Recipe, data: PreparedData) -> np.ndarray | None:
    """Return the order of each epoch, (epochs, samples), or None where it is a plain shuffle."""
    if not recipe.data.group_by_length and recipe.data.sampling == "uniform":
        return None
    training, count = recipe.training, len(data.train)
    sampler = sampler_of(recipe, data.train)
    num_batches = -(-count // training.per_device_train_batch_size)
    steps_per_epoch = max(1, -(-num_batches // training.gradient_accumulation_steps))
    epochs = []
    for epoch in range(-(-count_steps(recipe, count) // steps_per_epoch)):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    return np.array(epochs, dtype=np.int32)


def _requirements(recipe: Recipe) -> str:
    from importlib.metadata import version

    names = ["torch", "transformers", "datasets", "numpy"]
    names += ["peft"] if recipe.adapter.method != "none" else []
    names += ["bitsandbytes", "accelerate"] if recipe.quantization.bits or "bit" in recipe.training.optim else []
    return "".join(f"{name}=={version(name).split('+')[0]}\n" for name in names)


def _quantization(recipe: Recipe, constants: dict[str, Any]) -> str:
    wanted = recipe.quantization
    if not wanted.bits:
        return "return None"
    dtype = constants["AUTOCAST_DTYPE"] or constants["WEIGHT_DTYPE"]
    return (
        "return transformers.BitsAndBytesConfig(\n"
        f"    load_in_4bit={wanted.load_in_4bit!r}, load_in_8bit={wanted.load_in_8bit!r},\n"
        f"    bnb_4bit_quant_type={wanted.bnb_4bit_quant_type!r},\n"
        f"    bnb_4bit_use_double_quant={wanted.bnb_4bit_use_double_quant!r},\n"
        f"    bnb_4bit_compute_dtype=torch.{dtype}, llm_int8_threshold={wanted.llm_int8_threshold!r},\n"
        f"    llm_int8_skip_modules={list(wanted.llm_int8_skip_modules) or None!r},\n"
        ")"
    )


def _adapter(recipe: Recipe) -> str:
    adapter, lines = recipe.adapter, []
    if recipe.quantization.bits and recipe.quantization.prepare_model_for_kbit_training:
        lines.append("model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)")
    if adapter.method == "none":
        lines.append("return model")
        return "\n".join(lines)
    targets = adapter.target_modules if isinstance(adapter.target_modules, str) else list(adapter.target_modules)
    lines += [
        "config = peft.LoraConfig(",
        f"    r={adapter.r!r}, lora_alpha={adapter.lora_alpha!r}, lora_dropout={adapter.lora_dropout!r},",
        f"    target_modules={targets!r}, use_rslora={adapter.use_rslora!r}, use_dora={adapter.use_dora!r},",
        f"    modules_to_save={list(adapter.modules_to_save) or None!r},",
        f"    layers_to_transform={list(adapter.layers_to_transform) or None!r},",
        '    task_type="CAUSAL_LM",',
        ")",
        f"return peft.get_peft_model(model, config, autocast_adapter_dtype={adapter.autocast_adapter_dtype!r})",
    ]
    return "\n".join(lines)


def _optimizer(recipe: Recipe) -> str:
    training = recipe.training
    betas = f"betas=({training.adam_beta1!r}, {training.adam_beta2!r})"
    adam = f"lr=LEARNING_RATE, {betas}, eps={training.adam_epsilon!r}"
    calls = {
        "adamw_torch_fused": f"torch.optim.AdamW(groups, {adam}, fused=True)",
        "adamw_torch": f"torch.optim.AdamW(groups, {adam}, foreach=DEVICE == 'cuda')",
        "sgd": "torch.optim.SGD(groups, lr=LEARNING_RATE, foreach=DEVICE == 'cuda')",
        "adafactor": "transformers.optimization.Adafactor(\n"
        "    groups, lr=LEARNING_RATE, scale_parameter=False, relative_step=False, warmup_init=False\n)",
        "adamw_bnb_8bit": f"bitsandbytes.optim.AdamW8bit(groups, {adam})",
        "paged_adamw_8bit": f"bitsandbytes.optim.PagedAdamW8bit(groups, {adam})",
        "lion_8bit": f"bitsandbytes.optim.Lion8bit(groups, lr=LEARNING_RATE, {betas})",
    }
    lines = ["import bitsandbytes", ""] if "bit" in training.optim else []
    return "\n".join([*lines, f"return {calls[training.optim]}"])


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" if line else line for line in text.splitlines())
