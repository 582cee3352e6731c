"""The groups of a Recipe. Each field is spelled as Hugging Face or PEFT spell it, and documented in its docstring.

The panel's widgets, the CLI's flags, the YAML and the docs are generated from these classes;
``show`` says how the panel shows a field: ``main`` (always), ``more`` (behind a fold), ``hidden`` (YAML and CLI only).
``toggle`` marks the settings whose marginal effect on memory and time is shown beside them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..errors import Problem, RecipeError
from .locations import credentials_in


class Part(BaseModel):
    """Base of all groups: frozen, closed to unknown names, documented by attribute docstrings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


def _shown(
    default: Any, label: str, *, show: str = "more", toggle: bool = False, tries: tuple[Any, ...] = (), **limits: Any
) -> Any:
    """Return a pydantic field with what the panel needs to know beside its limits.

    ``tries`` are the values of a toggle whose effect is shown, where its other values cannot be counted up.
    """
    extra: dict[str, Any] = {"label": label, "show": show, "toggle": toggle or bool(tries), "tries": tries}
    return Field(default, json_schema_extra=extra, **limits)


class ModelPart(Part):
    """Which model, and how it is loaded."""

    name_or_path: str = _shown("smollm2-135m-instruct", "Model", show="main", min_length=1)
    """Hub id, local folder (weights, or only ``config.json``: enough to estimate), or a catalogue name."""
    task: Literal["causal-lm", "sequence-classification", "image-text-to-text", "seq2seq-lm"] = _shown(
        "causal-lm", "Task", show="main"
    )
    """What the model learns: to continue text (``causal-lm``), to name a row's class (``sequence-classification``), to
    answer about images (``image-text-to-text``), or to turn one text into another (``seq2seq-lm``)."""
    num_labels: int | None = _shown(None, "Classes", ge=2, le=100_000)
    """Classes of a classifier; empty takes as many as the data has (an estimate without data: as the config says)."""
    config: dict[str, Any] | None = _shown(None, "Inline config", show="hidden")
    """A ``config.json`` written out in the Recipe: enough to estimate a model that exists nowhere yet."""
    revision: str | None = _shown(None, "Revision", show="hidden")
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _shown("auto", "Weight dtype", toggle=True)
    """Dtype the weights are loaded in; ``auto`` keeps the checkpoint's own where weights are frozen and the device
    computes it natively, and takes float32 where they all train (16 bits would round small updates away)."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = _shown(
        "sdpa", "Attention", toggle=True
    )
    """Attention code: PyTorch's fused kernels (``sdpa``), plain matrix products (``eager``), or an add-on kernel."""
    new_tokens: tuple[str, ...] = _shown((), "New tokens")
    """Tokens that are added to the vocabulary, e.g. ``<think>,</think>``. Their embeddings start at the mean of the
    others; with LoRA only these rows train, and are saved with the adapter."""
    trust_remote_code: bool = _shown(False, "Run the model's own code", show="hidden")
    """Execute Python that comes with the model. Off unless you trust its author."""


class DataPart(Part):
    """Which rows, and how they become tokens."""

    name_or_path: str = _shown("python-docs", "Data set", show="main", min_length=1)
    """``python-docs`` (built in), a local JSONL, JSON, CSV, Parquet or text file, or a hub id."""
    config_name: str | None = _shown(None, "Configuration", show="hidden")
    """Configuration of a hub data set that has several."""
    split: str = _shown("train", "Split", show="hidden", min_length=1)
    """Split of a hub data set to train on."""
    max_rows: int | None = _shown(None, "Rows to use", ge=1)
    """Use only the first rows after shuffling; empty means all."""
    format: Literal["auto", "chat", "prompt_completion", "text"] = _shown("auto", "Row format")
    """How rows are read: chat messages, prompt and completion, or plain text. ``auto`` looks at the columns."""
    messages_column: str | None = _shown(None, "Messages column", show="hidden")
    """Column with the list of chat messages; found by itself when empty."""
    prompt_column: str | None = _shown(None, "Prompt column", show="hidden")
    """Column with the prompt; found by itself when empty."""
    completion_column: str | None = _shown(None, "Completion column", show="hidden")
    """Column with the answer to learn; found by itself when empty."""
    text_column: str | None = _shown(None, "Text column", show="hidden")
    """Column with plain text; found by itself when empty."""
    label_column: str | None = _shown(None, "Label column", show="hidden")
    """Column with a row's class (a whole number or a name); found by itself when empty."""
    image_column: str | None = _shown(None, "Image column", show="hidden")
    """Column with a row's image or images (path, bytes, or both); found by itself when empty."""
    train_on: Literal["assistant", "all"] = _shown("assistant", "Learn from")
    """Which tokens are learned: the assistant's answers only, or every token. Plain text always learns all."""
    max_length: int = _shown(512, "Max length", show="main", toggle=True, ge=8, le=1_048_576)
    """Longest sample in tokens; what is longer is cut at the end."""
    padding: Literal["longest", "max_length"] = _shown("longest", "Padding", toggle=True)
    """Pad each batch to its longest sample, or every sample to ``max_length``."""
    packing: bool = _shown(False, "Packing", show="main", toggle=True)
    """Join samples to full sequences of ``max_length`` without padding; samples do not see each other."""
    group_by_length: bool = _shown(False, "Group by length", toggle=True)
    """Draw batches from samples of similar length, so that less is padding."""
    sampling: Literal["uniform", "balanced_length", "balanced_class"] = _shown("uniform", "Sampling")
    """``uniform``: each sample once an epoch. Balanced: drawn with replacement, so that rare lengths (in powers of two)
    or rare classes come as often as common ones; some samples come several times an epoch and others never."""
    num_proc: int = _shown(1, "Tokenizing workers", show="hidden", ge=1, le=64)
    """Processes that tokenize."""
    dataloader_num_workers: int = _shown(0, "Loader workers", show="hidden", ge=0, le=64)
    """Processes that collate batches while the device computes."""


class AdapterPart(Part):
    """What trains: an adapter, or every weight."""

    method: Literal["lora", "bottleneck", "none"] = _shown("lora", "Adapter", show="main", toggle=True)
    """``lora`` trains small matrices beside frozen weights; ``bottleneck`` a small network behind attention and
    feed-forward of each layer, which cannot be merged into the weights; ``none`` every weight (full fine-tuning)."""
    name_or_path: str | None = _shown(None, "Start from adapter", min_length=1)
    """Folder of an adapter (or of a run) whose weights the run starts from; its rank, scale and targets take over."""
    bottleneck_size: int = _shown(64, "Bottleneck size", toggle=True, ge=1, le=65536)
    """Width in the middle of each bottleneck adapter: about ``4 x layers x hidden size x this`` parameters."""
    r: int = _shown(16, "LoRA r", toggle=True, ge=1, le=4096)
    """Rank of the LoRA matrices."""
    lora_alpha: int = _shown(32, "LoRA alpha", ge=1, le=65536)
    """Scale of the LoRA update: ``lora_alpha / r`` (``lora_alpha / sqrt(r)`` with rsLoRA)."""
    lora_dropout: float = _shown(0.0, "LoRA dropout", tries=(0.0, 0.05), ge=0.0, lt=1.0)
    """Dropout on the adapter's input; above 0 it keeps a mask and a copy per adapted module."""
    target_modules: str | tuple[str, ...] = _shown(
        "all-linear", "Target modules", tries=("all-linear", ("q_proj", "v_proj"))
    )
    """``all-linear``, or names of modules such as ``q_proj,v_proj``."""
    use_rslora: bool = _shown(False, "rsLoRA")
    """Scale by ``lora_alpha / sqrt(r)``, which keeps high ranks stable."""
    use_dora: bool = _shown(False, "DoRA", toggle=True)
    """Weight-decomposed LoRA: often better at low rank, slower, more memory."""
    modules_to_save: tuple[str, ...] = _shown((), "Modules trained whole", show="hidden")
    """Modules that are trained and saved whole beside the adapter, e.g. ``lm_head``."""
    layers_to_transform: tuple[int, ...] = _shown((), "Layers with an adapter", show="hidden")
    """Indices of the layers that get an adapter (LoRA or bottleneck); empty means all."""
    trainable_layers: int | None = _shown(None, "Train the last n layers", toggle=True, ge=1, le=1000)
    """Only the last layers train: with an adapter they alone get one, without it their weights. What lies below needs
    no gradient and keeps nothing for backward."""
    trainable_modules: tuple[str, ...] = _shown((), "Modules that train", show="hidden")
    """Without an adapter: only modules of these names train, e.g. ``self_attn,lm_head``; empty means all."""
    autocast_adapter_dtype: bool = _shown(True, "Adapter in float32", show="hidden", toggle=True)
    """Keep adapter weights in float32 when the base is in 16 bits (PEFT's default)."""


class QuantizationPart(Part):
    """Frozen base weights in 8 or 4 bits (bitsandbytes)."""

    load_in_4bit: bool = _shown(False, "4-bit base", show="main", toggle=True)
    """Keep the base in 4 bits (QLoRA): about 0.56 bytes per parameter."""
    load_in_8bit: bool = _shown(False, "8-bit base", show="main", toggle=True)
    """Keep the base in 8 bits (LLM.int8): about 1 byte per parameter."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = _shown("nf4", "4-bit type")
    """NF4 suits normally distributed weights; FP4 is a plain 4-bit float."""
    bnb_4bit_use_double_quant: bool = _shown(False, "Double quantization", toggle=True)
    """Quantize the quantization constants too: saves 0.05 bytes per parameter."""
    llm_int8_threshold: float = _shown(6.0, "int8 outlier threshold", show="hidden", ge=0.0)
    """Columns with larger activations are multiplied in 16 bits."""
    llm_int8_skip_modules: tuple[str, ...] = _shown((), "Modules not quantized", show="hidden")
    """Modules left in 16 bits beside the output head."""
    prepare_model_for_kbit_training: bool = _shown(True, "Norms and embeddings in float32", toggle=True)
    """Cast the parameters that are not quantized to float32, as PEFT's function of this name does."""

    @property
    def bits(self) -> int:
        """Bits of a quantized base weight; 0 when nothing is quantized."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else 0


OPTIMIZERS = (
    "adamw_torch_fused",
    "adamw_torch",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "adafactor",
    "lion_8bit",
    "sgd",
    "galore_adamw",
)


class TrainingPart(Part):
    """The loop: batch, steps, optimizer, precision, memory savers."""

    per_device_train_batch_size: int = _shown(2, "Batch size", show="main", toggle=True, ge=1, le=4096)
    """Samples in one forward pass."""
    gradient_accumulation_steps: int = _shown(4, "Accumulation", show="main", toggle=True, ge=1, le=4096)
    """Forward passes whose gradients are added before the optimizer steps."""
    learning_rate: float = _shown(2e-4, "Learning rate", show="main", gt=0.0, le=100.0)
    """Highest learning rate of the schedule."""
    num_train_epochs: float = _shown(1.0, "Epochs", show="main", gt=0.0, le=10_000.0)
    """Passes over the data; ``max_steps`` overrides it."""
    max_steps: int = _shown(-1, "Max steps", show="main", ge=-1)
    """Optimizer steps; -1 means whole epochs."""
    optim: Literal[
        "adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit", "adafactor", "lion_8bit", "sgd",
        "galore_adamw",
    ] = _shown("adamw_torch_fused", "Optimizer", show="main", toggle=True)  # fmt: skip
    """Optimizer; the 8-bit and paged ones come from bitsandbytes. ``galore_adamw`` trains every weight with the moments
    of its gradient's largest singular directions alone."""
    galore_rank: int = _shown(128, "GaLore rank", show="hidden", ge=1, le=8192)
    """Directions that ``galore_adamw`` keeps of each linear layer's gradient."""
    galore_update_proj_gap: int = _shown(200, "GaLore directions every", show="hidden", ge=1)
    """Steps after which the directions are taken anew, by a singular value decomposition of each gradient."""
    galore_scale: float = _shown(0.25, "GaLore scale", show="hidden", gt=0.0, le=100.0)
    """Scale of the low-rank updates beside the learning rate."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = _shown("linear", "Schedule")
    """How the learning rate moves after warm-up."""
    warmup_steps: int = _shown(0, "Warm-up steps", ge=0)
    """Optimizer steps during which the learning rate rises from 0."""
    weight_decay: float = _shown(0.0, "Weight decay", ge=0.0, le=10.0)
    """Decoupled weight decay; norms and biases are left out."""
    adam_beta1: float = _shown(0.9, "Adam beta1", show="hidden", ge=0.0, lt=1.0)
    """Decay of the first moment."""
    adam_beta2: float = _shown(0.999, "Adam beta2", show="hidden", ge=0.0, lt=1.0)
    """Decay of the second moment."""
    adam_epsilon: float = _shown(1e-8, "Adam epsilon", show="hidden", gt=0.0, le=1.0)
    """Added to the denominator of Adam's update."""
    max_grad_norm: float = _shown(1.0, "Clip gradient norm", tries=(0.0, 1.0), ge=0.0)
    """Gradients are scaled down to this norm; 0 turns clipping off."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = _shown("auto", "Mixed precision", show="main", toggle=True)
    """Autocast dtype. ``auto``: bf16 where the device computes it natively, else fp16 on a GPU, else none."""
    tf32: bool = _shown(False, "TF32 matrix products", toggle=True)
    """Let float32 matrix products use TF32 on Ampere and newer GPUs."""
    gradient_checkpointing: bool = _shown(False, "Gradient checkpointing", show="main", toggle=True)
    """Keep only each layer's input and compute the rest again in backward: less memory, about a third more time."""
    gradient_checkpointing_every: int = _shown(1, "Checkpoint every n-th layer", toggle=True, ge=1, le=1000)
    """Checkpoint only layers 0, n, 2n, ...: the others keep all they need and are not computed again."""
    gradient_checkpointing_keep_first: int = _shown(0, "Layers kept whole", ge=0, le=1000)
    """Leave the first layers out of gradient checkpointing: memory that is free anyway buys back some time."""
    activation_storage: Literal["full", "8bit", "4bit", "offload"] = _shown("full", "Saved activations", toggle=True)
    """What layers keep for backward: tensors as they are, in 8 or 4 bits (gradients become approximate), or in host
    memory. With gradient checkpointing it applies to each checkpointed layer's input."""
    activation_storage_layers: tuple[int, ...] = _shown((), "Layers of that storage", show="hidden")
    """Indices of the layers whose activations are stored so; empty means all."""
    loss_type: Literal["nll", "chunked_nll"] = _shown("nll", "Loss", toggle=True)
    """``chunked_nll`` never holds the logits of all tokens at once."""
    torch_compile: bool = _shown(False, "torch.compile")
    """Compile the forward and backward pass after the first three steps: seconds to minutes once, then faster steps
    where many small operators wait for each other. The run says what it took and after which step it has paid off."""
    torch_compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = _shown("default", "Compile mode")
    """``reduce-overhead`` captures CUDA graphs, for which all batches need one shape; ``max-autotune`` also tries
    kernels out, which takes minutes."""
    seed: int = _shown(42, "Seed", ge=0, le=2**32 - 1)
    """Seed of weights, data order and dropout."""
    logging_steps: int = _shown(1, "Log every", show="hidden", ge=1)
    """Steps between rows handed to ``report_to``; the panel and ``metrics.jsonl`` always have every step."""
    save_steps: int = _shown(100, "Checkpoint every", ge=0)
    """Steps between checkpoints; 0 keeps only the final one."""
    save_total_limit: int | None = _shown(2, "Checkpoints kept", show="hidden", ge=1)
    """Older checkpoints are deleted."""
    upload_to: str | None = _shown(None, "Upload to", min_length=1)
    """Store that each finished checkpoint and the result are copied to, as an fsspec URL (``file:///mnt/runs``,
    ``s3://bucket/runs``), each run in a folder of its name there: ``workbench train --resume URL`` goes on elsewhere.
    Credentials never stand in the URL; the store's own environment variables hold them."""
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = _shown((), "Report to", show="hidden")
    """Trackers that also receive the metrics."""

    @field_validator("upload_to")
    @classmethod
    def _is_plain_url(cls, value: str | None) -> str | None:
        # Not a ValueError: pydantic would repeat the value, and with it the secret.
        if value is not None and credentials_in(value):
            raise RecipeError([Problem("training.upload_to", credentials_in(value))])
        if value is not None and "://" not in value:
            text = f"{value!r} is no URL; allowed is one such as file:///mnt/runs or s3://bucket/runs."
            raise RecipeError([Problem("training.upload_to", text)])
        return value

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step on one device."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps


class PhasesPart(Part):
    """A run in phases, each with its own learning rate and its own layers that train."""

    steps: tuple[int, ...] = _shown((), "Steps of each phase")
    """Optimizer steps of each phase, e.g. ``100,300``; together they are the run. Empty: one phase."""
    learning_rate: tuple[float, ...] = _shown((), "Learning rate of each phase")
    """Highest learning rate of each phase, whose schedule begins anew; empty takes ``training.learning_rate``."""
    trainable_layers: tuple[int, ...] = _shown((), "Last layers of each phase")
    """How many of the last layers train in each phase, 0 for all; empty: all in every phase."""


class PruningPart(Part):
    """Weights of the repeated layers that are set to zero and stay zero."""

    method: Literal["none", "l1_global", "structured"] = _shown("none", "Pruning", toggle=True)
    """``l1_global`` zeroes the smallest weights of all layers together; ``structured`` whole rows of each matrix, those
    of the smallest norm. With an adapter the frozen base is pruned, and merging keeps its zeros."""
    amount: float = _shown(0.3, "Share pruned", gt=0.0, lt=1.0)
    """Share of the weights (of the rows) that become zero."""
    step: int | None = _shown(0, "Prune after", ge=0)
    """Optimizer steps before pruning; the rest of the run trains on with the zeros held. 0 prunes before the first
    step, empty after the last, without training on."""


class TasksPart(Part):
    """Several tasks that one run learns together, each with adapters of its own above shared ones."""

    data: tuple[str, ...] = _shown((), "Tasks")
    """One ``name=data set`` for each task, e.g. ``sort=sort.jsonl,sum=sum.jsonl``; empty: one task, of the data group,
    whose other fields apply to every task."""
    shared_layers: int | None = _shown(None, "Shared layers", ge=0, le=1000)
    """How many of the lower layers all tasks share an adapter in; above, each task has its own. Empty shares half."""


class EvaluationPart(Part):
    """Held-out rows, and what they decide."""

    split: str = _shown("auto", "Evaluation split", show="hidden", min_length=1)
    """``auto`` holds rows out of the training data, ``none`` does not evaluate, else a split of the data set."""
    max_rows: int = _shown(64, "Held-out rows", ge=1)
    """Rows held out or used."""
    eval_steps: int = _shown(50, "Evaluate every", ge=0)
    """Steps between evaluations; 0 evaluates only at the end."""
    per_device_eval_batch_size: int = _shown(4, "Evaluation batch size", toggle=True, ge=1, le=4096)
    """Samples in one forward pass of the evaluation."""
    early_stopping_patience: int | None = _shown(None, "Stop early after", ge=1)
    """Evaluations without a better loss after which the run stops; empty never stops early."""
    load_best_model_at_end: bool = _shown(False, "Keep the best checkpoint")
    """Save the weights of the best evaluation instead of the last ones."""
    num_samples: int = _shown(0, "Answers at checkpoints", ge=0, le=16)
    """Held-out rows that the model answers before the run and at each checkpoint, to be read side by side; 0: none."""
    sample_prompts: tuple[str, ...] = _shown((), "Prompts at checkpoints", show="hidden")
    """Prompts of your own that it answers then, before those rows."""
    sample_max_new_tokens: int = _shown(48, "Longest answer", show="hidden", ge=1, le=1024)
    """Tokens of such an answer. The likeliest token each: no random number is drawn, the run learns the same."""


class HardwarePart(Part):
    """Where the run happens."""

    device: Literal["auto", "cpu", "cuda"] = _shown("auto", "Run on", show="main")
    """``auto`` takes the GPU where there is one."""
    emulate: str | None = _shown(None, "Pretend to be", show="main")
    """Name of a GPU from the device table: estimates aim at it; a CPU run is measured by its simulated allocator."""
    torch_version: str | None = _shown(None, "PyTorch version", show="hidden")
    """Version whose allocator and workspace rules apply; empty means the installed one."""
    expandable_segments: bool = _shown(False, "Expandable segments", toggle=True)
    """``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``: less fragmentation."""


class CostPart(Part):
    """What an hour of the device costs."""

    price_per_hour_usd: float | None = _shown(None, "Price per hour (USD)", ge=0.0)
    """Used for cost figures; empty takes the device table's price where it has one."""


class ShardingPart(Part):
    """Several devices: how many, who holds what, and the wires between them."""

    num_processes: int = _shown(1, "Devices", ge=1, le=65_536)
    """Processes in all, one on each device. Each takes ``per_device_train_batch_size`` samples at a time."""
    num_machines: int = _shown(1, "Machines", ge=1, le=8192)
    """Machines that share the processes equally."""
    layout: Literal["ddp", "fsdp", "hybrid", "zero1", "zero2", "zero3"] = _shown("ddp", "Layout")
    """What each device holds. ``ddp``: everything; ``fsdp``: its share of weights, gradients and optimizer state;
    ``hybrid``: its share within a machine, with copies across machines; ``zero1``, ``zero2``, ``zero3``: DeepSpeed's
    shares of the state, of the gradients too, of the weights too."""
    tensor_parallel_size: int = _shown(1, "Tensor parallel", show="hidden", ge=1, le=64)
    """Devices that split each matrix product; for estimates."""
    pipeline_parallel_size: int = _shown(1, "Pipeline stages", show="hidden", ge=1, le=256)
    """Stages that the layers are cut into; for estimates."""
    network: Literal["auto", "nvlink", "pcie"] = _shown("auto", "Links in a machine")
    """How the devices of one machine reach each other; ``auto``: NVLink where the device is sold with it, else PCIe."""
    machine_network: Literal["25gbit", "100gbit", "400gbit"] = _shown("100gbit", "Link between machines")
    """What one machine sends to the others."""
    bucket_cap_mb: int = _shown(25, "Gradient bucket (MB)", show="hidden", ge=1, le=1000)
    """Gradients are sent in buckets of this size while backward goes on."""
    timeout_s: int = _shown(600, "Name a late device after (s)", show="hidden", ge=5, le=86_400)
    """Seconds without progress after which the device that did not arrive is named and the run ends."""


class PoliciesPart(Part):
    """What happens when something goes wrong, and what adapts while the run goes on."""

    batch: Literal["fixed", "noise_scale"] = _shown("fixed", "Batch per step")
    """``fixed`` takes ``gradient_accumulation_steps`` forward passes a step. ``noise_scale`` begins there and follows
    the measured gradient noise: few passes while steps agree, more where they scatter. The learning rate stays as the
    schedule says, a growing batch takes the place of a falling rate. Needs ``max_steps``."""
    min_accumulation: int = _shown(2, "Fewest passes a step", show="hidden", ge=2, le=4096)
    """Lower bound of ``noise_scale``: 2, since the noise is measured between micro-batches of a step."""
    max_accumulation: int = _shown(32, "Most passes a step", show="hidden", ge=2, le=4096)
    """Upper bound of ``noise_scale``."""
    on_oom: Literal["stop", "halve_micro_batch", "adapt_micro_batch"] = _shown("stop", "On out of memory")
    """In forward or backward: ``stop`` says what fits, or cut micro-batches in halves and repeat the step, with the
    same samples, loss and gradients up to rounding. ``halve_micro_batch`` keeps the smaller size;
    ``adapt_micro_batch`` goes back to larger ones, up to ``per_device_train_batch_size``, where the measured memory
    leaves room."""
    on_nonfinite: Literal["stop", "skip"] = _shown("stop", "On NaN or Inf")
    """A step with a NaN or Inf gradient never updates the weights; then ``stop`` the run or ``skip`` the step."""
    on_spike: Literal["keep", "skip", "damp"] = _shown("keep", "On a loss spike")
    """A step whose loss stands far out of the last 50 is always told with its rows; then ``keep`` learns from it,
    ``skip`` leaves the update out, ``damp`` scales its gradients down to the median norm of those steps."""
    spike_factor: float = _shown(6.0, "Spike factor", gt=0.0, le=1000.0)
    """A spike begins at median + factor x 1.4826 x MAD (median absolute deviation) of the losses of the last 50 steps:
    the factor counts standard deviations where losses scatter normally."""
