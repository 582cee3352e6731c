"""One row of ``docs/techniques.md`` for each technique: which fields switch it on, and when to leave it off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Base = Literal["adapter", "full", "padded", "classifier"]


@dataclass(frozen=True)
class Technique:
    """A technique and its run.

    Attributes:
        group, name: Where it stands on the page.
        changes: Fields that switch it on; ``{folder}`` in a text stands for a folder of the run's own.
        does, costs, avoid: What it does, what it costs, when not to use it.
        base: The run it is compared with: the LoRA run, the same with every weight trained, the LoRA run padded to
            ``max_length``, or a classifier.
        also: Fields of both runs.
    """

    group: str
    name: str
    changes: dict[str, Any]
    does: str
    costs: str
    avoid: str
    base: Base = "adapter"
    also: dict[str, Any] = field(default_factory=dict)


def _precision() -> list[Technique]:
    group = "Precision and quantisation"
    return [
        Technique(
            group,
            "bf16",
            {"training.mixed_precision": "bf16"},
            "matrix products in bfloat16 under autocast; norms, softmax and loss stay float32",
            "a cast of each weight; 8 bits of mantissa",
            "devices without bfloat16 units: T4, V100, most CPUs",
        ),
        Technique(
            group,
            "fp16 with loss scaling",
            {"training.mixed_precision": "fp16"},
            "matrix products in float16; the loss is scaled, so that small gradients survive",
            "overflow above 65504; steps are skipped while the scale settles",
            "models trained in bfloat16",
        ),
        Technique(
            group,
            "tf32",
            {"training.tf32": True},
            "float32 products in 19-bit tensor cores",
            "10 bits of mantissa in products",
            "GPUs older than Ampere",
        ),
        Technique(
            group,
            "frozen weights in bfloat16",
            {"model.dtype": "bfloat16"},
            "halves what frozen weights take; the adapter stays float32",
            "rounding of the base",
            "full fine-tuning: 16 bits round small updates away",
        ),
        Technique(
            group,
            "8-bit base",
            {"quantization.load_in_8bit": True},
            "frozen linear layers in LLM.int8",
            "slower products, an error of about 1 % in each",
            "full fine-tuning; where 4 bits are needed anyway",
        ),
        Technique(
            group,
            "4-bit base (QLoRA)",
            {"quantization.load_in_4bit": True},
            "frozen linear layers in NF4",
            "unpacking in every product",
            "full fine-tuning; models that fit without",
        ),
        Technique(
            group,
            "double quantisation",
            {"quantization.load_in_4bit": True, "quantization.bnb_4bit_use_double_quant": True},
            "the constants of the 4-bit blocks in 8 bits",
            "a second unpacking",
            "models of less than a billion parameters",
        ),
        Technique(
            group,
            "4-bit base without the float32 casts",
            {"quantization.load_in_4bit": True, "quantization.prepare_model_for_kbit_training": False},
            "norms and embeddings keep their dtype",
            "16-bit norms where the checkpoint has them",
            "fp16 training",
        ),
    ]


def _activations() -> list[Technique]:
    group, on = "Activations", "training.gradient_checkpointing"
    return [
        Technique(
            group,
            "gradient checkpointing",
            {on: True},
            "keeps each layer's input and computes the rest again",
            "a second forward pass of every layer",
            "where memory is free",
        ),
        Technique(
            group,
            "every second layer",
            {on: True, "training.gradient_checkpointing_every": 2},
            "checkpoints layers 0, 2, 4, ...",
            "a second forward pass of half the layers",
            "where all or nothing fits",
        ),
        Technique(
            group,
            "first 10 layers kept whole",
            {on: True, "training.gradient_checkpointing_keep_first": 10},
            "checkpoints the layers above",
            "their second forward pass",
            "where all or nothing fits",
        ),
        Technique(
            group,
            "activations in 8 bits",
            {"training.activation_storage": "8bit"},
            "stores what backward needs in 8 bits",
            "packing and unpacking; approximate gradients",
            "where checkpointing fits: it is exact",
        ),
        Technique(
            group,
            "activations in 4 bits",
            {"training.activation_storage": "4bit"},
            "stores what backward needs in 4 bits, an eighth of float32",
            "packing; coarser gradients",
            "where checkpointing fits: it is exact",
        ),
        Technique(
            group,
            "activations in host memory",
            {"training.activation_storage": "offload"},
            "moves what backward needs to the host and back",
            "the link's time both ways; host memory",
            "slow links; devices that share the host's memory",
        ),
        Technique(
            group,
            "chunked loss",
            {"training.loss_type": "chunked_nll"},
            "never holds the logits of all tokens at once",
            "the head's products again in backward",
            "small vocabularies",
        ),
        Technique(
            group,
            "eager attention",
            {"model.attn_implementation": "eager"},
            "plain products and softmax, scores kept",
            "length x length scores of each head",
            "long sequences; use sdpa",
        ),
        Technique(
            group,
            "FlashAttention 2",
            {"model.attn_implementation": "flash_attention_2"},
            "no padding inside attention, scores never stored",
            "a package that has to match torch and CUDA",
            "GPUs older than Ampere",
        ),
        Technique(
            group,
            "flex attention",
            {"model.attn_implementation": "flex_attention"},
            "masks as code that is compiled into the kernel",
            "seconds of compiling",
            "where sdpa has a kernel for the mask",
        ),
    ]


def _optimizers() -> list[Technique]:
    group = "Optimizer (every weight trains)"
    rows = [
        (
            "AdamW, foreach",
            "adamw_torch",
            "all parameters in a few kernels",
            "temporaries as large as the parameters",
            "where fused runs",
        ),
        (
            "8-bit AdamW",
            "adamw_bnb_8bit",
            "both moments in 8 bits, a quarter of float32",
            "rounding of the moments",
            "adapters: too small to gain",
        ),
        (
            "paged 8-bit AdamW",
            "paged_adamw_8bit",
            "8-bit moments that move to the host when memory is short",
            "page faults when they do",
            "where nothing is short",
        ),
        (
            "Adafactor",
            "adafactor",
            "second moments as rows and columns",
            "its own rate of learning",
            "where AdamW's state fits",
        ),
        (
            "Lion, 8 bits",
            "lion_8bit",
            "one moment, in 8 bits; updates by sign",
            "a rate of learning ten times smaller",
            "small batches",
        ),
        ("SGD", "sgd", "no state", "slow on transformers", "nearly always"),
        (
            "GaLore",
            "galore_adamw",
            "moments of each gradient's largest directions alone",
            "a singular value decomposition every 200 steps",
            "adapters; short runs",
        ),
    ]
    return [
        Technique(group, name, {"training.optim": optim}, does, costs, avoid, base="full")
        for name, optim, does, costs, avoid in rows
    ]


def _adapters() -> list[Technique]:
    group = "Adapters and what trains"
    return [
        Technique(
            group,
            "every weight",
            {"adapter.method": "none"},
            "full fine-tuning",
            "gradients and two moments of every weight",
            "small data sets; small cards",
        ),
        Technique(
            group,
            "LoRA on q and v alone",
            {"adapter.target_modules": ("q_proj", "v_proj")},
            "fewer matrices beside fewer layers",
            "less to learn with",
            "where quality counts more than memory",
        ),
        Technique(
            group,
            "DoRA",
            {"adapter.use_dora": True},
            "learns direction and length of each weight apart",
            "the norm of every weight in each pass",
            "where time counts",
        ),
        Technique(
            group,
            "rsLoRA",
            {"adapter.use_rslora": True, "adapter.r": 64},
            "a scale that keeps high ranks stable",
            "the memory of the rank",
            "ranks up to 16",
        ),
        Technique(
            group,
            "LoRA dropout",
            {"adapter.lora_dropout": 0.05},
            "drops inputs of the adapter",
            "a mask and a copy for each adapted module",
            "large data sets",
        ),
        Technique(
            group,
            "bottleneck adapters",
            {"adapter.method": "bottleneck"},
            "a small network behind attention and feed-forward",
            "cannot be merged: each pass stays longer",
            "where the result must be a plain model",
        ),
        Technique(
            group,
            "only the last 8 layers",
            {"adapter.trainable_layers": 8},
            "nothing below needs gradients or keeps activations",
            "the lower layers learn nothing",
            "tasks far from what the model knows",
        ),
        Technique(
            group,
            "only attention, every weight",
            {"adapter.trainable_modules": ("self_attn",)},
            "gradients and moments of the chosen modules alone",
            "the others learn nothing",
            "where LoRA serves",
            base="full",
        ),
        Technique(
            group,
            "two phases",
            {"phases.steps": (2, 3), "phases.learning_rate": (1e-3, 2e-4), "phases.trainable_layers": (8, 0)},
            "first the last layers, then all, each with its own schedule",
            "a border where the optimizer begins anew",
            "short runs",
        ),
        Technique(
            group,
            "new tokens",
            {"model.new_tokens": ("<think>", "</think>")},
            "adds rows to the embeddings; only they train beside the adapter",
            "the rows are saved with the adapter",
            "where existing tokens can say it",
        ),
        Technique(
            group,
            "pruning, unstructured",
            {"pruning.method": "l1_global", "pruning.amount": 0.3},
            "the smallest weights become zero and stay so",
            "quality; zeros are stored, so nothing is saved on a GPU",
            "where no sparse kernel runs the result",
        ),
        Technique(
            group,
            "pruning of whole rows",
            {"pruning.method": "structured", "pruning.amount": 0.1},
            "rows of the smallest norm become zero",
            "more quality than single weights",
            "small models",
        ),
        Technique(
            group,
            "two tasks, shared lower adapters",
            {"tasks.data": ("first={folder}/first.jsonl", "second={folder}/second.jsonl")},
            "adapters shared below, own ones above, a gate for each task",
            "an adapter for each task",
            "tasks that are one task",
        ),
    ]


def _data() -> list[Technique]:
    group = "Data"
    return [
        Technique(
            group,
            "dynamic padding",
            {"data.padding": "longest"},
            "pads to the longest row of the batch",
            "shapes that change",
            "CUDA graphs; compiled models of one shape",
            base="padded",
        ),
        Technique(
            group,
            "grouping by length",
            {"data.group_by_length": True},
            "batches of rows of like length",
            "an order that is less random",
            "where length says what a row is about",
        ),
        Technique(
            group,
            "packing",
            {"data.packing": True},
            "joins rows to full sequences, kept apart by their positions",
            "more rows in a step",
            "models whose masks do not keep rows apart (refused by name)",
        ),
        Technique(
            group,
            "balance by length",
            {"data.sampling": "balanced_length"},
            "rare lengths as often as common ones",
            "rare rows are repeated",
            "even data",
        ),
        Technique(
            group,
            "learn from every token",
            {"data.train_on": "all"},
            "prompts are learned too",
            "effort on what the user says",
            "chat data",
        ),
        Technique(
            group,
            "loader workers",
            {"data.dataloader_num_workers": 1},
            "collates while the device computes",
            "a process and its memory",
            "rows that are tokenized already: nothing waits",
        ),
        Technique(
            group,
            "skip spikes",
            {"policies.on_spike": "skip", "policies.spike_factor": 3.0},
            "leaves an update out whose loss stands far out, and names its rows",
            "hard rows are left out too",
            "data whose hard rows are the point",
        ),
        Technique(
            group,
            "damp spikes",
            {"policies.on_spike": "damp", "policies.spike_factor": 3.0},
            "scales such an update down",
            "hard rows count less",
            "clean data",
        ),
    ]


def _loop() -> list[Technique]:
    group = "Loop"
    split = {"training.per_device_train_batch_size": 1, "training.gradient_accumulation_steps": 2}
    return [
        Technique(
            group,
            "gradient accumulation",
            split,
            "1 x 2 in place of 2 x 1, normalised over all tokens",
            "small products use a GPU badly",
            "where the batch fits",
        ),
        Technique(
            group,
            "micro-batch that adapts",
            {"policies.on_oom": "adapt_micro_batch"},
            "halves the micro-batch when memory runs out and repeats the step; grows again with room",
            "nothing until then",
            "nearly never",
        ),
        Technique(
            group,
            "batch by gradient noise",
            {**split, "policies.batch": "noise_scale"},
            "accumulates more where gradients scatter, less where they agree",
            "two norms a micro-batch",
            "schedules that were tuned for one batch size",
            also={},
        ),
        Technique(
            group,
            "no clipping",
            {"training.max_grad_norm": 0.0},
            "gradients as they are",
            "one wild row moves every weight",
            "nearly always",
        ),
        Technique(
            group,
            "torch.compile",
            {"training.torch_compile": True},
            "fuses small operators",
            "compiling, seconds to minutes, again for new shapes",
            "short runs",
        ),
        Technique(
            group,
            "CUDA graphs",
            {"training.torch_compile": True, "training.torch_compile_mode": "reduce-overhead"},
            "launches a step as one graph",
            "static shapes, memory of its own",
            "shapes that move: refused with the reason",
        ),
        Technique(
            group,
            "another seed",
            {"training.seed": 7},
            "other weights of the adapter, another order of rows",
            "nothing; the same seed repeats a CPU run bit for bit",
            "comparing settings: keep it",
        ),
        Technique(
            group,
            "checkpoint every step",
            {"training.save_steps": 1},
            "atomic, verified, resumes bit for bit on a CPU",
            "writing; the adapter and its moments",
            "large models: choose hundreds of steps",
        ),
        Technique(
            group,
            "upload to a store",
            {"training.save_steps": 3, "training.upload_to": "file://{folder}/store"},
            "checkpoints go to any fsspec URL; another machine resumes",
            "the line's bandwidth",
            "data that must stay here",
        ),
        Technique(
            group,
            "a price per hour",
            {"cost.price_per_hour_usd": 1.2},
            "money per run and per 1,000 tokens, live",
            "nothing",
            "never",
        ),
    ]


def _tasks() -> list[Technique]:
    return [
        Technique(
            "Models",
            "classifier, balanced by class",
            {"data.sampling": "balanced_class"},
            "a head that names a row's class; rare classes as often as common ones",
            "rare rows are repeated",
            "classes of like size",
            base="classifier",
        ),
        Technique(
            "Models",
            "images and text",
            {"model.task": "image-text-to-text"},
            "answers about images",
            "the image's tokens in every row",
            "models without an image encoder",
        ),
    ]


TECHNIQUES: tuple[Technique, ...] = (
    *_precision(),
    *_activations(),
    *_optimizers(),
    *_adapters(),
    *_data(),
    *_loop(),
    *_tasks(),
)
