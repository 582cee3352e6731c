"""Which settings a plan may change, and what each change alters beside memory and time.

Three grades, so that nothing is altered silently: changes that leave what is learned the same up to rounding; changes
of number formats, which say what they alter; and a change of the method, which is only made when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..hardware import Device
from ..recipe import Recipe

Freedom = Literal["nothing", "numerics", "method"]

# Splits of the effective batch that are tried on each side of the present one.
MAX_SPLITS = 5

SPLIT_FIELDS = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")


@dataclass(frozen=True)
class Choice:
    """One value of a dimension.

    Attributes:
        changes: What sets it; empty for the settings as they are.
        alters: What it alters beyond memory, time and rounding; empty for nothing.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    alters: str = ""


@dataclass(frozen=True)
class Dimension:
    """Alternatives of which one is taken, in an order where neighbours are alike.

    Attributes:
        choices: The alternatives.
        start: Index of the settings as they are.
        is_ordered: Whether only neighbours are worth trying from one of them.
    """

    choices: tuple[Choice, ...]
    start: int = 0
    is_ordered: bool = False


def explicit_fields(recipe: Recipe, base: Recipe | None = None) -> frozenset[str]:
    """Return the fields that a person set: those that differ from ``base``, by default a plain Recipe.

    How the effective batch is split into micro-batches is not counted: only pinning a field of it by name keeps it.
    """
    differing = frozenset((base or Recipe()).diff(recipe))
    return differing - frozenset(SPLIT_FIELDS)


def dimensions(
    recipe: Recipe, device: Device, pinned: Collection[str] = (), freedom: Freedom = "numerics"
) -> list[Dimension]:
    """Return what may be changed.

    Args:
        recipe: The settings as they are.
        device: The target.
        pinned: Fields that keep their value.
        freedom: How much may be altered beside memory and time.
    """
    makers = [*_MAKERS, _method] if freedom == "method" else _MAKERS
    found = []
    for dimension in (make(recipe, device) for make in makers):
        if dimension is None:
            continue
        choices = tuple(choice for choice in dimension.choices if freedom != "nothing" or not choice.alters)
        touched = {path for choice in choices for path in choice.changes}
        if len(choices) > 1 and not touched & set(pinned):
            found.append(replace(dimension, choices=choices))
    return found


def _alternatives(path: str, recipe: Recipe, *others: tuple[Any, str]) -> Dimension | None:
    choices = [Choice({path: value}, alters) for value, alters in others if value != recipe.get(path)]
    return Dimension((Choice(), *choices)) if choices else None


def _split(recipe: Recipe, device: Device) -> Dimension | None:
    effective = recipe.training.effective_batch_size
    current = recipe.training.per_device_train_batch_size
    sizes = [size for size in range(1, min(effective, 4096) + 1) if effective % size == 0 and effective // size <= 4096]
    place = sizes.index(current)
    sizes = sizes[max(0, place - MAX_SPLITS) : place + MAX_SPLITS + 1]
    if len(sizes) < 2:
        return None
    choices = tuple(
        Choice(dict(zip(SPLIT_FIELDS, (size, effective // size), strict=True)) if size != current else {})
        for size in sizes
    )
    return Dimension(choices, start=sizes.index(current), is_ordered=True)


def _checkpointing(recipe: Recipe, device: Device) -> Dimension | None:
    """From everything kept to everything computed again; in between every n-th layer is checkpointed."""
    training = recipe.training
    now = (training.gradient_checkpointing, training.gradient_checkpointing_every)
    grades = [(False, 1), (True, 4), (True, 2), (True, 1)]
    if now not in grades:
        grades.insert(1, now)
    choices = []
    for is_on, every in grades:
        wanted: dict[str, Any] = {
            "training.gradient_checkpointing": is_on,
            "training.gradient_checkpointing_every": every,
        }
        if not is_on:
            wanted["training.gradient_checkpointing_keep_first"] = 0
        choices.append(Choice({path: value for path, value in wanted.items() if value != recipe.get(path)}))
    return Dimension(tuple(choices), start=grades.index(now), is_ordered=True)


def _storage(recipe: Recipe, device: Device) -> Dimension | None:
    words = "keeps saved activations in {} bits, which makes gradients approximate"
    others = [("8bit", words.format(8)), ("4bit", words.format(4))]
    if device.has_caching_allocator:
        others.append(("offload", ""))
    return _alternatives("training.activation_storage", recipe, *others)


def _padding(recipe: Recipe, device: Device) -> Dimension | None:
    return _alternatives("data.padding", recipe, ("longest", "")) if recipe.data.padding == "max_length" else None


def _loss(recipe: Recipe, device: Device) -> Dimension | None:
    return _alternatives("training.loss_type", recipe, ("chunked_nll", ""), ("nll", ""))


def _segments(recipe: Recipe, device: Device) -> Dimension | None:
    return _alternatives("hardware.expandable_segments", recipe, (True, "")) if device.has_caching_allocator else None


def _attention(recipe: Recipe, device: Device) -> Dimension | None:
    return _alternatives("model.attn_implementation", recipe, ("sdpa", ""))


def _evaluation(recipe: Recipe, device: Device) -> Dimension | None:
    if recipe.evaluation.split == "none":
        return None
    return _alternatives("evaluation.per_device_eval_batch_size", recipe, (1, ""))


# Optimizers that make the same updates up to rounding.
_SAME_UPDATES = (("adamw_torch_fused", "adamw_torch"), ("adamw_bnb_8bit", "paged_adamw_8bit"))
_IN_8_BITS = "keeps the optimizer's moments in 8 bits"


def _optimizer(recipe: Recipe, device: Device) -> Dimension | None:
    family = next((names for names in _SAME_UPDATES if recipe.training.optim in names), ())
    others = [(name, "") for name in family]
    if family == _SAME_UPDATES[0]:
        others += [(name, _IN_8_BITS) for name in _SAME_UPDATES[1]]
    return _alternatives("training.optim", recipe, *others)


def _precision(recipe: Recipe, device: Device) -> Dimension | None:
    if recipe.training.mixed_precision != "no":
        return None
    words = "computes matrix products in 16 bits"
    return _alternatives("training.mixed_precision", recipe, ("auto", words))


def _base_bits(recipe: Recipe, device: Device) -> Dimension | None:
    quantization = recipe.quantization
    if recipe.adapter.method == "none" or quantization.load_in_4bit:
        return None
    four = {"quantization.load_in_4bit": True}
    if quantization.load_in_8bit:
        four["quantization.load_in_8bit"] = False
    return Dimension((Choice(), Choice(four, "keeps the frozen weights in 4 bits")))


def _double_quantization(recipe: Recipe, device: Device) -> Dimension | None:
    if not recipe.quantization.load_in_4bit or recipe.quantization.bnb_4bit_use_double_quant:
        return None
    path = "quantization.bnb_4bit_use_double_quant"
    return _alternatives(path, recipe, (True, "quantizes the quantization constants too"))


def _method(recipe: Recipe, device: Device) -> Dimension | None:
    if recipe.adapter.method != "none":
        return None
    words = "trains a LoRA adapter instead of every weight"
    bits = {"adapter.method": "lora", "quantization.load_in_4bit": True}
    return Dimension(
        (Choice(), Choice({"adapter.method": "lora"}, words), Choice(bits, f"{words}, on frozen weights in 4 bits"))
    )


_Maker = Callable[[Recipe, Device], Dimension | None]
_MAKERS: tuple[_Maker, ...] = (
    _split, _padding, _checkpointing, _storage, _loss, _segments, _attention, _evaluation, _optimizer, _precision,
    _base_bits, _double_quantization,
)  # fmt: skip
