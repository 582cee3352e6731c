"""What an estimate says. Plain data: no torch, so that panel, CLI and report read it for free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ..events import Timeline
from ..units import format_bytes, format_seconds
from .explanation import Explanation

Verdict = Literal["fits", "tight", "does_not_fit"]

VERDICT_TEXTS: dict[str, str] = {"fits": "fits", "tight": "tight", "does_not_fit": "does not fit"}


@dataclass(frozen=True)
class PeakHolder:
    """Who holds memory at the peak.

    Attributes:
        category: One of MEMORY_CATEGORIES.
        module: Path of the module that made it, with layer numbers as ``*`` where equal layers are added up.
        operator: The operator that made it, e.g. ``"aten._log_softmax"``; empty for parameters.
        num_bytes: Bytes alive at the peak.
        count: Storages added up.
    """

    category: str
    module: str
    operator: str
    num_bytes: int
    count: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted memory over the whole life of the run on one device.

    Attributes:
        peak_allocated_bytes: Highest allocated bytes (``torch.cuda.max_memory_allocated``), after block rounding.
        peak_reserved_bytes: Highest reserved bytes (``torch.cuda.max_memory_reserved``); on a CPU equal to allocated.
        process_bytes: What nvidia-smi would show for the process: reserved plus context; on a CPU the process's RSS.
        capacity_bytes: What the device offers to one process.
        interval_bytes: ``(low, high)`` of ``process_bytes``.
        verdict: ``"fits"``, ``"tight"`` (the interval reaches over the capacity) or ``"does_not_fit"``.
        breakdown: Bytes by category at the peak; they add up to ``process_bytes``.
        peak_phase: Phase of the peak: ``"load"``, ``"forward"``, ``"backward"``, ``"optimizer"``, ``"evaluation"``
            or ``"save"``.
        peak_step: Optimizer step of the peak, 0 for the first; None outside the steps.
        rest_bytes: Allocated bytes between steps, once the optimizer state exists.
        host_bytes: Host memory beside (paged or offloaded state); 0 on a CPU, where all is host memory.
        peak_by_phase: Highest allocated bytes of each phase.
        holders: Largest holders at the peak, largest first.
        timeline: Allocated bytes by category over the traced life.
        bytes_per_token: Slope of the peak per token of a micro-batch; None where it was not derived.
        fragmentation_bytes: Reserved and not allocated when most is reserved; 0 on a CPU.
        fragmentation_cause: What was asked for when the allocator last grew, and why what it had did not do.
        smallest_capacity_bytes: Memory of the smallest device on which the run survives, context included: below the
            reserved peak the allocator gives back what it caches. None on a CPU, and where it was not asked for
            (``with_smallest_capacity``, ``explain_run``).
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int
    capacity_bytes: int
    interval_bytes: tuple[int, int]
    verdict: Verdict
    breakdown: Mapping[str, int]
    peak_phase: str
    peak_step: int | None
    rest_bytes: int
    host_bytes: int
    peak_by_phase: Mapping[str, int]
    holders: Sequence[PeakHolder]
    timeline: Timeline
    bytes_per_token: float | None = None
    fragmentation_bytes: int = 0
    fragmentation_cause: str = ""
    smallest_capacity_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """True only for the verdict ``"fits"``."""
        return self.verdict == "fits"


@dataclass(frozen=True)
class TimeEstimate:
    """Predicted time of one optimizer step.

    Attributes:
        step_s: Seconds per optimizer step (all its micro-batches).
        tokens_per_s: Real tokens (padding excluded) per second.
        samples_per_s: Samples per second.
        seconds_by_class: Seconds by operator class: ``matmul``, ``attention``, ``elementwise``, ``dequantize``,
            ``optimizer``, ``launch``.
        flops: Floating-point operations of one optimizer step.
        basis: ``"table"`` (peak rates and general efficiencies), ``"calibrated"`` (this device was measured) or
            ``"anchored"`` (a step of this very run was measured).
        interval_s: ``(low, high)`` of ``step_s``.
        total_s: Seconds of the whole run, or None where the number of steps is not known.
        num_steps: Optimizer steps of the run, or None.
        cost_usd: ``(low, high)`` of the whole run, or None.
        cost_usd_per_1000_tokens: ``(low, high)`` per 1,000 real tokens, or None where no price is known.
        epoch_s: Seconds of one pass over the data, or None where the number of samples is not known.
        seconds_by_limit: Seconds of ``step_s`` by what bounds them: ``compute`` (arithmetic), ``bandwidth`` (moving
            bytes) and ``launch`` (the device, or the CPU's cores, wait for operators to be launched).
    """

    step_s: float
    tokens_per_s: float
    samples_per_s: float
    seconds_by_class: Mapping[str, float]
    flops: float
    basis: str
    interval_s: tuple[float, float]
    total_s: float | None = None
    num_steps: int | None = None
    cost_usd: tuple[float, float] | None = None
    cost_usd_per_1000_tokens: tuple[float, float] | None = None
    epoch_s: float | None = None
    seconds_by_limit: Mapping[str, float] = field(default_factory=dict)

    @property
    def bound_by(self) -> str:
        """What takes the largest share of the step: ``"compute"``, ``"bandwidth"`` or ``"launch"``, or nothing."""
        return max(self.seconds_by_limit, key=lambda name: self.seconds_by_limit[name], default="")


@dataclass(frozen=True)
class BatchShape:
    """The batch an estimate is for.

    Attributes:
        batch_size: Samples in one micro-batch.
        length: Tokens per sample of the longest batch, padding included.
        mean_length: Tokens per sample of a mean batch, padding included.
        mean_real_tokens: Real tokens per sample of a mean batch.
        padded: Whether a batch holds padding, so that a mask is passed and the attention kernel changes.
        source: ``"data"`` (lengths of the chosen data set) or ``"max_length"`` (every sample assumed full).
        num_samples: Samples of the training set, or None.
        max_real_tokens: Most real tokens that a batch can hold (its samples are the longest), or None where it is not
            known.
        raw_lengths: Tokens of each training row before cutting and packing (of a sample of very many), or None: with
            them ``reshaped`` knows what a change of padding, packing or length does.
    """

    batch_size: int
    length: int
    mean_length: float
    mean_real_tokens: float
    padded: bool
    source: str
    num_samples: int | None = None
    max_real_tokens: int | None = None
    raw_lengths: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Estimate:
    """What a run will take. ``to_dict`` is what ``workbench estimate --json`` prints.

    Attributes:
        recipe_digest: ``Recipe.digest()`` of the recipe it is for.
        device_name: The device it is for.
        num_parameters: Parameters of the model, adapters included (packed weights counted unpacked).
        num_trainable_parameters: Of these, the ones that train.
        shape: The batch it is for.
        notes: Sentences a person should know: assumptions, what is not modelled.
        elapsed_s: What making the estimate took.
        was_cached: Whether the trace came from the cache.
        explanation: Why the peak is what it is, from ``explain_run``; None where it was not asked for.
    """

    recipe_digest: str
    device_name: str
    num_parameters: int
    num_trainable_parameters: int
    shape: BatchShape
    memory: MemoryEstimate
    time: TimeEstimate
    notes: Sequence[str] = ()
    elapsed_s: float = 0.0
    was_cached: bool = False
    explanation: Explanation | None = None

    def verdict_sentence(self) -> str:
        """Return whether it fits, with the bytes, what they lie between, and where the peak is."""
        memory = self.memory
        low, high = memory.interval_bytes
        step = f" of step {memory.peak_step + 1}." if memory.peak_step is not None else "."
        return (
            f"{VERDICT_TEXTS[memory.verdict].capitalize()} on {self.device_name}: "
            f"{format_bytes(memory.process_bytes)} of {format_bytes(memory.capacity_bytes)} "
            f"(between {format_bytes(low)} and {format_bytes(high)}), peak in {memory.peak_phase}{step}"
        )

    def step_sentence(self) -> str:
        """Return the time of a step, what it lies between and rests on, and tokens per second."""
        low, high = self.time.interval_s
        return (
            f"Step: {format_seconds(self.time.step_s)} (between {format_seconds(low)} and "
            f"{format_seconds(high)}, {self.time.basis}), {self.time.tokens_per_s:,.0f} tokens/s."
        )

    def __str__(self) -> str:
        return f"{self.verdict_sentence()}\n{self.step_sentence()}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # The timeline alone has thousands of numbers: a cell that ends in an estimate shows the verdict.
        printer.text(str(self))

    def to_dict(self, *, with_timeline: bool = False) -> dict[str, Any]:
        """Return nested plain values; the timeline only when asked for (it is long)."""
        bare = self if self.explanation is None else replace(self, explanation=self.explanation.without_picture())
        values = asdict(bare)
        del values["shape"]["raw_lengths"]
        values["memory"]["fits"] = self.memory.fits
        if self.explanation is None:
            del values["explanation"]
        if not with_timeline:
            del values["memory"]["timeline"]
        return values
