"""Rules across fields. All problems at once, each naming the field and a value that works.

Rules that need the target device take it as plain facts, so that this package stays below ``hardware``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import Problem, RecipeError
from .loop_rules import loop_problems
from .recipe import Recipe
from .trained_rules import trained_problems


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What the rules need to know of the device a run or an estimate is for.

    Attributes:
        name: For messages.
        kind: ``"cuda"`` or ``"cpu"``.
        bf16_native: Whether bfloat16 is computed natively, not emulated.
        compute_capability: ``(major, minor)`` of a CUDA device, else None.
        for_estimate: True when nothing is executed, so that optional packages are not needed.
    """

    name: str
    kind: str
    bf16_native: bool
    compute_capability: tuple[int, int] | None = None
    for_estimate: bool = False


Rule = Callable[[Recipe, "TargetFacts | None"], "list[Problem]"]


def find_problems(recipe: Recipe, target: TargetFacts | None = None) -> list[Problem]:
    """Return every problem that several fields, or a field and the device, cause together."""
    return [problem for rule in _RULES for problem in rule(recipe, target)]


def require_valid(recipe: Recipe, target: TargetFacts | None = None) -> None:
    """Raise RecipeError with all problems, if there are any."""
    problems = find_problems(recipe, target)
    if problems:
        raise RecipeError(problems)


def _quantization(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    quantization, problems = recipe.quantization, []
    if quantization.load_in_4bit and quantization.load_in_8bit:
        problems.append(
            Problem(
                "quantization.load_in_8bit",
                "a base is either in 4 or in 8 bits, not both.",
                (("quantization.load_in_8bit", False),),
            )
        )
    if quantization.bits and recipe.adapter.method == "none":
        problems.append(
            Problem(
                "adapter.method",
                f"weights in {quantization.bits} bits cannot be trained; they need an adapter beside them.",
                (("adapter.method", "lora"),),
            )
        )
    needs_package = quantization.bits or recipe.training.optim in ("adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit")
    executes = target is None or not target.for_estimate
    if needs_package and executes and importlib.util.find_spec("bitsandbytes") is None:
        field = "training.optim"
        fix: tuple[tuple[str, object], ...] = (("training.optim", "adamw_torch_fused"),)
        if quantization.bits:
            field = f"quantization.load_in_{quantization.bits}bit"
            fix = ((field, False),)
        problems.append(
            Problem(
                field, "needs the package bitsandbytes: run pip install 'workbench[quantization]', or do without.", fix
            )
        )
    return problems


def _precision(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    problems: list[Problem] = []
    training, model = recipe.training, recipe.model
    if training.mixed_precision == "fp16" and model.dtype == "float16" and recipe.adapter.method == "none":
        problems.append(
            Problem(
                "model.dtype",
                "float16 weights cannot train with fp16 mixed precision: the scaler refuses float16 gradients.",
                (("model.dtype", "float32"),),
            )
        )
    if target is None:
        return problems
    if target.kind == "cuda" and not target.bf16_native and training.mixed_precision == "bf16":
        problems.append(
            Problem(
                "training.mixed_precision",
                f"{target.name} does not compute bfloat16 natively (it would emulate it, many times slower).",
                (("training.mixed_precision", "fp16"),),
            )
        )
    if target.kind == "cpu" and training.mixed_precision == "fp16":
        problems.append(
            Problem(
                "training.mixed_precision",
                "fp16 mixed precision needs a GPU; a CPU has bf16 or none.",
                (("training.mixed_precision", "no"),),
            )
        )
    return problems


def _attention(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    attention = recipe.model.attn_implementation
    problems: list[Problem] = []
    if attention == "flash_attention_2" and target is not None:
        capability = target.compute_capability
        fix: tuple[tuple[str, object], ...] = (("model.attn_implementation", "sdpa"),)
        if target.kind != "cuda" or (capability is not None and capability < (8, 0)):
            message = f"flash_attention_2 needs an Ampere or newer GPU; {target.name} is none."
            problems.append(Problem("model.attn_implementation", message, fix))
        elif not target.for_estimate and importlib.util.find_spec("flash_attn") is None:
            message = "flash_attention_2 needs the package flash-attn."
            problems.append(Problem("model.attn_implementation", message, fix))
    if attention == "flex_attention" and target is not None and target.kind != "cuda":
        # Source: _apply_kernel_options and _validate_device, torch/nn/attention/flex_attention.py of torch 2.13.
        message = f"flex_attention has no backward pass but on a GPU; {target.name} is none."
        problems.append(Problem("model.attn_implementation", message, (("model.attn_implementation", "sdpa"),)))
    return problems


def _data(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    data, problems = recipe.data, []
    if data.packing and data.group_by_length:
        problems.append(
            Problem(
                "data.group_by_length",
                "packed sequences all have the same length; there is nothing to group.",
                (("data.group_by_length", False),),
            )
        )
    if data.packing and data.padding == "max_length":
        problems.append(Problem("data.padding", "packed sequences need no padding.", (("data.padding", "longest"),)))
    reason = _against_balance(recipe)
    if reason:
        problems.append(Problem("data.sampling", f"{data.sampling} {reason}", (("data.sampling", "uniform"),)))
    return problems


def _against_balance(recipe: Recipe) -> str:
    """Return why samples cannot be drawn as ``data.sampling`` says; empty where they can."""
    data = recipe.data
    if data.sampling == "uniform":
        return ""
    if data.packing:
        return "draws single samples, and packing has joined them to sequences of one length."
    if data.group_by_length:
        return "draws samples at random, and group_by_length puts those of similar length together."
    if data.sampling == "balanced_class" and recipe.model.task != "sequence-classification":
        return f"needs classes, which belong to model.task=sequence-classification, not to {recipe.model.task}."
    return ""


def _task(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    task, data, problems = recipe.model.task, recipe.data, []
    if task != "causal-lm" and data.packing:
        message = f"packing joins texts for a causal language model; the samples of {task} stay apart."
        problems.append(Problem("data.packing", message, (("data.packing", False),)))
    if task in ("sequence-classification", "seq2seq-lm") and recipe.training.loss_type != "nll":
        message = f"{task} has no long row of logits to cut into chunks."
        problems.append(Problem("training.loss_type", message, (("training.loss_type", "nll"),)))
    if task == "sequence-classification" and data.format in ("chat", "prompt_completion"):
        message = f"a classifier reads one text (or a pair) with a label, not {data.format}."
        problems.append(Problem("data.format", message, (("data.format", "auto"),)))
    if task == "seq2seq-lm" and data.format in ("chat", "text"):
        message = f"an encoder-decoder reads a prompt and writes a completion; {data.format} is one text."
        problems.append(Problem("data.format", message, (("data.format", "prompt_completion"),)))
    if task != "sequence-classification":
        for field, value in (("model.num_labels", recipe.model.num_labels), ("data.label_column", data.label_column)):
            if value is not None:
                message = f"classes belong to model.task=sequence-classification, not to {task}."
                problems.append(Problem(field, message, ((field, None),)))
    if task != "image-text-to-text" and data.image_column is not None:
        message = f"images belong to model.task=image-text-to-text, not to {task}."
        problems.append(Problem("data.image_column", message, (("data.image_column", None),)))
    return problems


def _evaluation(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    evaluation, problems = recipe.evaluation, []
    needs = [
        name
        for name, wanted in (
            ("early_stopping_patience", evaluation.early_stopping_patience is not None),
            ("load_best_model_at_end", evaluation.load_best_model_at_end),
        )
        if wanted
    ]
    for name in needs:
        if evaluation.split == "none":
            problems.append(Problem(f"evaluation.{name}", "needs held-out rows.", (("evaluation.split", "auto"),)))
        elif evaluation.eval_steps == 0:
            problems.append(
                Problem(f"evaluation.{name}", "needs evaluations during the run.", (("evaluation.eval_steps", 50),))
            )
    return problems


def _adapter(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    adapter, problems = recipe.adapter, []
    if adapter.method == "lora" and not adapter.target_modules:
        problems.append(
            Problem(
                "adapter.target_modules",
                "an empty list adapts nothing.",
                (("adapter.target_modules", "all-linear"),),
            )
        )
    if any(index < 0 for index in adapter.layers_to_transform):
        problems.append(
            Problem(
                "adapter.layers_to_transform",
                "layer indices count from 0.",
                (("adapter.layers_to_transform", ()),),
            )
        )
    return problems


def _trained(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    return trained_problems(recipe)


def _activations(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    training, problems = recipe.training, []
    for name, default in (("gradient_checkpointing_every", 1), ("gradient_checkpointing_keep_first", 0)):
        if getattr(training, name) != default and not training.gradient_checkpointing:
            problems.append(
                Problem(
                    f"training.{name}",
                    "says which layers are checkpointed, and gradient checkpointing is off.",
                    (("training.gradient_checkpointing", True),),
                )
            )
    if training.activation_storage_layers and training.activation_storage == "full":
        problems.append(
            Problem(
                "training.activation_storage_layers",
                "names layers for a storage that is not chosen.",
                (("training.activation_storage", "8bit"),),
            )
        )
    if any(index < 0 for index in training.activation_storage_layers):
        problems.append(
            Problem(
                "training.activation_storage_layers",
                "layer indices count from 0.",
                (("training.activation_storage_layers", ()),),
            )
        )
    if training.activation_storage == "offload" and target is not None and target.kind == "cpu":
        problems.append(
            Problem(
                "training.activation_storage",
                f"{target.name} computes in host memory already, so that moving activations there frees nothing; "
                "8bit and 4bit do.",
                (("training.activation_storage", "8bit"),),
            )
        )
    return problems


def _trainable(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    adapter, problems = recipe.adapter, []
    if adapter.trainable_modules and adapter.method != "none":
        problems.append(
            Problem(
                "adapter.trainable_modules",
                "names weights that train without an adapter; beside one it is modules_to_save.",
                (("adapter.trainable_modules", ()),),
            )
        )
    if adapter.trainable_layers is not None and adapter.layers_to_transform:
        problems.append(
            Problem(
                "adapter.layers_to_transform",
                "and trainable_layers both say which layers get an adapter.",
                (("adapter.layers_to_transform", ()),),
            )
        )
    return problems


def _phases(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    phases, problems = recipe.phases, []
    if any(steps < 1 for steps in phases.steps):
        problems.append(Problem("phases.steps", "each phase has at least 1 step.", (("phases.steps", ()),)))
    if any(not rate > 0 for rate in phases.learning_rate):
        problems.append(Problem("phases.learning_rate", "a learning rate is above 0.", (("phases.learning_rate", ()),)))
    if any(count < 0 for count in phases.trainable_layers):
        problems.append(
            Problem("phases.trainable_layers", "counts layers; 0 means all.", (("phases.trainable_layers", ()),))
        )
    for name in ("learning_rate", "trainable_layers"):
        values = getattr(phases, name)
        if values and len(values) != len(phases.steps):
            problems.append(
                Problem(
                    f"phases.{name}",
                    f"has {len(values)} values for {len(phases.steps)} phases; give one for each, or none.",
                    ((f"phases.{name}", ()),),
                )
            )
    total = sum(phases.steps)
    if phases.steps and recipe.training.max_steps not in (-1, total):
        problems.append(
            Problem(
                "training.max_steps",
                f"{recipe.training.max_steps} is not the {total} steps of all phases.",
                (("training.max_steps", -1),),
            )
        )
    if phases.steps and recipe.sharding.num_processes > 1 and phases.trainable_layers:
        problems.append(
            Problem(
                "phases.trainable_layers",
                "several devices share gradients of the same parameters in every step; phases on one device work.",
                (("phases.trainable_layers", ()),),
            )
        )
    return problems


def _sharding(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    sharding, problems = recipe.sharding, []
    count = sharding.num_processes
    if count % sharding.num_machines:
        fitting = max(size for size in range(1, sharding.num_machines + 1) if count % size == 0)
        problems.append(
            Problem(
                "sharding.num_machines",
                f"{count} processes cannot be shared equally by {sharding.num_machines} machines.",
                (("sharding.num_machines", fitting),),
            )
        )
    model_parallel = sharding.tensor_parallel_size * sharding.pipeline_parallel_size
    if count % model_parallel:
        problems.append(
            Problem(
                "sharding.num_processes",
                f"{count} is no multiple of {model_parallel}, the devices that one copy of the model takes "
                "(tensor_parallel_size x pipeline_parallel_size).",
                (("sharding.num_processes", model_parallel * max(1, count // model_parallel)),),
            )
        )
    cuts_weights = sharding.layout in ("fsdp", "hybrid", "zero3")
    if count > 1 and cuts_weights and recipe.quantization.bits:
        problems.append(
            Problem(
                "sharding.layout",
                f"{sharding.layout} cannot cut weights in {recipe.quantization.bits} bits; ddp gives each device all.",
                (("sharding.layout", "ddp"),),
            )
        )
    if count > 1 and sharding.layout != "ddp" and recipe.training.optim in _BLOCKWISE_OPTIMIZERS:
        problems.append(
            Problem(
                "training.optim",
                f"{recipe.training.optim} keeps its state in blocks of whole weights, which {sharding.layout} cuts.",
                (("training.optim", "adamw_torch_fused"),),
            )
        )
    return problems


def _loop(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    return loop_problems(recipe)


def _compile(recipe: Recipe, target: TargetFacts | None) -> list[Problem]:
    training, mode = recipe.training, "training.torch_compile_mode"
    problems: list[Problem] = []
    if not training.torch_compile:
        return problems
    off = (("training.torch_compile", False),)
    if training.torch_compile_mode == "reduce-overhead":
        if target is not None and target.kind == "cpu":
            text = f"reduce-overhead captures CUDA graphs; {target.name} has none."
            problems.append(Problem(mode, text, ((mode, "default"),)))
        elif recipe.data.padding != "max_length" and not recipe.data.packing:
            text = "reduce-overhead replays CUDA graphs of one shape; padding=longest gives each batch another length."
            problems.append(Problem(mode, text, (("data.padding", "max_length"),)))
    if training.activation_storage != "full":
        text = "compiled code decides by itself what it keeps for backward; activation_storage would have no effect."
        problems.append(Problem("training.activation_storage", text, (("training.activation_storage", "full"),)))
    if target is None or target.for_estimate:
        return problems
    if target.kind == "cpu" and recipe.hardware.emulate:
        text = "the simulated allocator does not see what compiled code allocates; measure one without the other."
        problems.append(Problem("training.torch_compile", text, off))
    missing = _missing_compiler(target.kind)
    if missing:
        text = f"needs {missing}, which is not found. Install it, or do without."
        problems.append(Problem("training.torch_compile", text, off))
    return problems


def _missing_compiler(kind: str) -> str:
    """Return what torch's compiler needs and this machine lacks; empty where it has all.

    Source:
        ``cpp.cxx`` in torch/_inductor/config.py and ``get_cpp_compiler`` in cpp_builder.py; GPUs need Triton.
    """
    if kind == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton"
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", default)
    return "" if shutil.which(compiler) else f"a C++ compiler ({compiler})"


# Their states are quantized in blocks, or factored by rows and columns, of a whole weight.
_BLOCKWISE_OPTIMIZERS = ("adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit", "adafactor", "galore_adamw")

_RULES: tuple[Rule, ...] = (
    _quantization,
    _precision,
    _loop,
    _attention,
    _data,
    _task,
    _evaluation,
    _adapter,
    _trainable,
    _trained,
    _phases,
    _activations,
    _compile,
    _sharding,
)
