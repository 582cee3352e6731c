"""Audits of the model and its optimizer: what trains, what is tied, what the rows of the embedding are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...components.own_adapter import own_adapter
from ...units import format_bytes
from ..finding import Finding, make_finding
from .subject import Subject, original_module, register

FAR_SIGMA = 8.0


def _is_adapter(name: str) -> bool:
    return any(
        word in name
        for word in ("lora_", "modules_to_save", "trainable_tokens", "ia3_", "prompt_encoder", ".bottleneck.")
    )


def _trainable(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@register
def something_trains(subject: Subject) -> Finding | None:
    """Some parameter must require a gradient, and of an adapter's at least one."""
    if subject.model is None or subject.saved_folder is not None:
        return None
    adapters = [name for name, _ in subject.model.named_parameters() if "lora_" in name]
    if others := _trainable(subject.model):
        if not adapters or any(_is_adapter(name) for name in others):
            return None
        return make_finding(
            "model.adapter_frozen",
            f"None of the adapter's {len(adapters)} tensors trains, while {len(others)} others do, first {others[0]}: "
            "the saved adapter will be the one of the start.",
            where={"parameter": others[0]},
            evidence={"num_adapter_tensors": len(adapters)},
        )
    if adapters:
        return make_finding(
            "model.adapter_frozen",
            f"0 trainable parameters: the adapter with {len(adapters)} tensors was loaded for inference.",
            evidence={"num_adapter_tensors": len(adapters)},
            confidence=1.0,
        )
    return make_finding("model.no_trainable", "0 parameters require a gradient: nothing would train.", confidence=1.0)


@register
def optimizer_has_them(subject: Subject) -> Finding | None:
    """What trains must be in the optimizer."""
    if subject.model is None or subject.optimizer is None:
        return None
    held = {id(p) for group in subject.optimizer.param_groups for p in group["params"]}
    trainable = [(name, p) for name, p in subject.model.named_parameters() if p.requires_grad]
    missing = [name for name, p in trainable if id(p) not in held]
    if not missing:
        return None
    return make_finding(
        "model.optimizer_misses",
        f"{len(missing)} of {len(trainable)} trainable tensors are not in the optimizer, first "
        f"{missing[0]}: it was built "
        "before they were.",
        where={"parameter": missing[0]},
        evidence={"num_missing": len(missing), "num_trainable": len(trainable)},
        confidence=1.0,
    )


@register
def only_the_adapter(subject: Subject) -> Finding | None:
    """Beside an adapter nothing else should train unless it is saved with it."""
    if subject.model is None:
        return None
    names = _trainable(subject.model)
    adapter = [name for name in names if _is_adapter(name)]
    own = own_adapter(subject.model)
    saved = set(own.names if own is not None else ())
    others = [name for name in names if not _is_adapter(name) and name not in saved]
    if not adapter or not others:
        return None
    sizes = {name: p.numel() for name, p in subject.model.named_parameters()}
    share = sum(sizes[name] for name in others) / sum(sizes[name] for name in names)
    return make_finding(
        "model.extra_trainable",
        f"{len(others)} tensors beside the adapter are trainable ({', '.join(others[:3])}; {100 * share:.0f} % of what "
        "trains) and will not be saved with it.",
        where={"parameter": others[0]},
        evidence={"num_extra": len(others)},
    )


@register
def targets_match(subject: Subject) -> Finding | None:
    """Each target name must match a module."""
    configs = getattr(subject.model, "peft_config", None)
    if not isinstance(configs, dict) or subject.model is None:
        return None
    modules = {name.rsplit(".", 1)[-1] for name, _ in subject.model.named_modules()}
    for config in configs.values():
        targets = getattr(config, "target_modules", None)
        if not isinstance(targets, (set, list, tuple)):
            continue
        unmatched = sorted(name for name in targets if name.rsplit(".", 1)[-1] not in modules)
        if unmatched:
            return make_finding(
                "model.adapter_not_attached",
                f"The target {unmatched[0]!r} matches no module; {len(targets) - len(unmatched)} of {len(targets)} do.",
                where={"object": unmatched[0]},
                evidence={"unmatched": tuple(unmatched)},
            )
    return None


@register
def ties_hold(subject: Subject) -> Finding | None:
    """Tied embeddings must still be one storage."""
    model = subject.model
    config = getattr(model, "config", None)
    if model is None or not getattr(config, "tie_word_embeddings", False):
        return None
    try:
        first, second = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError, TypeError):
        return None
    one, two = (getattr(original_module(layer), "weight", None) for layer in (first, second))
    if not isinstance(one, Tensor) or not isinstance(two, Tensor) or one.device.type == "meta":
        return None
    if one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr():
        return None
    return make_finding(
        "model.tie_broken",
        "embed_tokens and lm_head were tied and no longer share storage: two copies train apart.",
        where={"object": "lm_head"},
        confidence=0.95,
    )


@register
def new_rows(subject: Subject) -> Finding | None:
    """Rows added to the embedding must be near the others, and trained and saved when an adapter is."""
    weight = subject.embedding
    if weight is None or weight.shape[0] < 16 or weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    rows = weight.detach()[-4096:].float()
    norms = rows.norm(dim=1)
    tail, body = _tail(norms)
    if tail:
        return make_finding(
            "model.new_rows_far",
            f"The last {tail} embedding rows have norm {float(norms[-tail:].mean()):.3g}, the others "
            f"{float(body.mean()):.3g}: they were initialised far away.",
            where={"rows": (weight.shape[0] - tail, weight.shape[0] - 1)},
            evidence={"norm_new": float(norms[-tail:].mean()), "norm_old": float(body.mean())},
        )
    return _frozen_new_rows(subject, weight, rows)


def _tail(norms: Tensor) -> tuple[int, Tensor]:
    """Return how many rows at the end stand out, at most a quarter of all."""
    body = norms[: max(8, 3 * len(norms) // 4)]
    limit = float(body.mean() + max(FAR_SIGMA * float(body.std()), 2.0 * float(body.mean())))
    count = 0
    for value in norms.flip(0).tolist():
        if value <= limit or count >= len(norms) // 4:
            break
        count += 1
    return count, body


def _frozen_new_rows(subject: Subject, weight: Tensor, rows: Tensor) -> Finding | None:
    """Find rows that are the mean of the others (as resizing makes them) under an adapter that does not train them."""
    model = subject.model
    if model is None or not hasattr(model, "peft_config") or weight.requires_grad:
        return None
    if any("trainable_tokens" in name and p.requires_grad for name, p in model.named_parameters()):
        return None
    body = rows[: 3 * len(rows) // 4]
    mean = body.mean(0)
    typical = float((body - mean).norm(dim=1).median())
    count = 0
    for row in rows.flip(0):
        if float((row - mean).norm()) > 0.2 * typical or count >= len(rows) // 4:
            break
        count += 1
    if not count:
        return None
    return make_finding(
        "model.new_rows_not_saved",
        f"{count} new token rows at the end of the embedding are frozen and not part of the adapter: after loading it "
        "they will be something else.",
        where={"rows": (weight.shape[0] - count, weight.shape[0] - 1)},
        evidence={"num_new_rows": count},
    )


@register
def used_rows_are_sound(subject: Subject) -> Finding | None:
    """Tokens of the data must not have a NaN or zero embedding row."""
    weight, ids = subject.embedding, subject.collated.get("input_ids")
    if weight is None or not isinstance(ids, Tensor) or ids.is_floating_point():
        return None
    mask = subject.collated.get("attention_mask")
    used = ids[mask.bool()] if isinstance(mask, Tensor) and mask.shape == ids.shape else ids.flatten()
    used = torch.unique(used[(used >= 0) & (used < weight.shape[0])])
    # The padding token's row is zero by design, and its outputs are never looked at.
    owners = (subject.tokenizer, getattr(subject.model, "config", None))
    for pad in (getattr(owner, "pad_token_id", None) for owner in owners):
        if isinstance(pad, int):
            used = used[used != pad]
    if not len(used):
        return None
    rows = weight.detach()[used].float()
    bad = (~torch.isfinite(rows).all(1)) | (rows.abs().sum(1) == 0)
    if not bool(bad.any()):
        return None
    token = int(used[bad][0])
    kind = "NaN" if not bool(torch.isfinite(rows[bad][0]).all()) else "zero"
    where_rows = torch.nonzero((ids == token).any(1)).flatten().tolist()
    return make_finding(
        "model.embedding_row",
        f"Token id {token} has a {kind} embedding row and occurs in {len(where_rows)} sampled rows: "
        f"it was never trained.",
        where={"token_id": token, "rows": tuple(where_rows[:8])},
        confidence=0.95,
    )


@register
def stale_attributes(subject: Subject) -> Finding | None:
    """Modules should not keep activations in attributes."""
    if subject.model is None:
        return None
    found: list[tuple[str, int, bool]] = []
    for name, module in subject.model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_parameters") or attribute in ("_buffers", "_modules"):
                continue
            for tensor in _tensors(value):
                if tensor.grad_fn is not None or (tensor.ndim >= 2 and not isinstance(tensor, nn.Parameter)):
                    has_backward = bool(module._backward_hooks or module._backward_pre_hooks)
                    found.append((f"{name}.{attribute}", tensor.untyped_storage().nbytes(), has_backward))
    if not found:
        return None
    total = sum(size for _, size, _ in found)
    if any(has_backward for _, _, has_backward in found):
        return make_finding(
            "leak.backward_hook",
            f"Backward hooks keep {format_bytes(total)} of gradients of activations in {len(found)} attributes, e.g. "
            f"{found[0][0]}.",
            where={"object": found[0][0]},
            evidence={"held_bytes": total},
        )
    return make_finding(
        "leak.module_attribute",
        f"Module attributes hold {format_bytes(total)} of activations, e.g. {found[0][0]}, and nothing clears them.",
        where={"object": found[0][0]},
        evidence={"held_bytes": total, "num_attributes": len(found)},
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, (list, tuple)) else []


@register
def weights_can_move(subject: Subject) -> Finding | None:
    """A step must be larger than the spacing of the weights' dtype."""
    if subject.optimizer is None or subject.model is None:
        return None
    names = {id(p): name for name, p in subject.model.named_parameters()}
    stuck, total, example = 0, 0, ""
    for group in subject.optimizer.param_groups:
        rate = float(group.get("lr", 0.0))
        for parameter in group["params"]:
            total += 1
            if parameter.dtype not in (torch.bfloat16, torch.float16) or not rate or parameter.device.type == "meta":
                continue
            if "adam" not in type(subject.optimizer).__name__.lower():
                continue
            size = parameter.detach().float().abs()
            spacing = size * float(torch.finfo(parameter.dtype).eps)
            # Adam moves each weight by about the learning rate; half a spacing rounds back to where it was.
            if float((spacing > 2 * rate).float().mean()) > 0.9:
                stuck += 1
                example = example or names.get(id(parameter), "")
    if not stuck or stuck < 0.5 * total:
        return None
    return make_finding(
        "model.weights_not_moving",
        f"{stuck} of {total} trained tensors are in 16 bits and the learning rate is below the "
        f"spacing of their values: "
        "steps round to no change.",
        where={"parameter": example},
        evidence={"num_stuck": stuck},
    )


@register
def scaler_needs_float32(subject: Subject) -> Finding | None:
    """Mixed precision with a gradient scaler needs float32 weights."""
    if subject.model is None or not getattr(subject.args, "fp16", False):
        return None
    from ..failures import explain_failure

    found = explain_failure(ValueError("Attempting to unscale FP16 gradients."), subject.model, None, {})
    return found if found.evidence.get("num_half") else None
