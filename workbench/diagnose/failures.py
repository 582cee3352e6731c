"""Findings from exceptions that are not about memory: the message, checked against the model and the batch."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .finding import Finding, make_finding


def explain_failure(
    error: BaseException, model: nn.Module | None, optimizer: Any, inputs: Mapping[str, Tensor]
) -> Finding:
    """Return what an exception of a training loop means.

    Args:
        error: What left the loop.
        model: The watched model.
        optimizer: The watched optimizer, or None.
        inputs: Tensors of the last forward pass by name.
    """
    text = str(error)
    return (
        _half_precision_scaler(text, model)
        or _no_graph(text, model)
        or _ids(error, model, inputs)
        or make_finding(
            "error.other", f"{type(error).__name__}: {text.splitlines()[0] if text else ''}", confidence=0.3
        )
    )


def half_trainable(model: nn.Module) -> list[str]:
    """Return the names of trainable parameters in float16."""
    return [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]


def _half_precision_scaler(text: str, model: nn.Module | None) -> Finding | None:
    if "unscale FP16" not in text or model is None:
        return None
    names = half_trainable(model)
    others = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float32]
    saved = [name for name in names if "modules_to_save" in name]
    evidence = {"num_half": len(names), "num_float32": len(others), "names": tuple(names[:10])}
    if names and len(saved) == len(names) and others:
        return make_finding(
            "nonfinite.scaler_fp16_saved_modules",
            f"Only the modules trained whole ({', '.join(saved[:3])}) are float16; the {len(others)} "
            f"adapter weights are "
            "float32. The gradient scaler needs float32.",
            where={"parameter": saved[0]},
            evidence=evidence,
            confidence=1.0,
        )
    return make_finding(
        "nonfinite.scaler_fp16_weights",
        f"{len(names)} trainable parameters are float16 ({', '.join(names[:3])}); the gradient scaler needs float32.",
        where={"parameter": names[0] if names else ""},
        evidence=evidence,
        confidence=1.0,
    )


def _no_graph(text: str, model: nn.Module | None) -> Finding | None:
    if "does not require grad" not in text or model is None:
        return None
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    adapters = [name for name, _ in model.named_parameters() if "lora_" in name]
    if not trainable and adapters:
        return make_finding(
            "model.adapter_frozen",
            f"0 trainable parameters: the adapter with {len(adapters)} tensors was loaded for inference.",
            evidence={"num_trainable": 0},
            confidence=0.95,
        )
    if not trainable:
        return make_finding("model.no_trainable", "Nothing trains: no parameter requires a gradient.", confidence=0.95)
    reason = "gradients were off" if not torch.is_grad_enabled() else "inputs are frozen under reentrant checkpointing"
    return make_finding(
        "model.loss_without_graph",
        f"The loss has no graph although {len(trainable)} parameters are trainable: {reason}.",
        evidence={"num_trainable": len(trainable)},
        confidence=0.9,
    )


def _ids(error: BaseException, model: nn.Module | None, inputs: Mapping[str, Tensor]) -> Finding | None:
    if not isinstance(error, (IndexError, RuntimeError)) or model is None:
        return None
    return find_ids_out_of_range(model, inputs) or _failed_lookup(error, model) or _failed_target(error)


def _failed_lookup(error: BaseException, model: nn.Module) -> Finding | None:
    """Read the ids from the frame of the embedding that failed: any model, any name for its inputs."""
    names = {id(module): name for name, module in model.named_modules()}
    for frame in _frames(error):
        module, ids = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and isinstance(ids, Tensor):
            bad = torch.nonzero((ids < 0) | (ids >= module.num_embeddings))
            if not len(bad):
                return None
            place = bad[0].tolist()
            token, name = int(ids[tuple(place)]), names.get(id(module), "embedding")
            return make_finding(
                "data.ids_out_of_range",
                f"Id {token} is outside the embedding {name!r} ({module.num_embeddings} rows), batch row {place[0]}, "
                f"position {place[-1]}. On a GPU this is a device assert that ends the kernel's context.",
                where={"module": name, "batch_row": place[0], "position": place[-1], "token_id": token},
                evidence={"num_embedding_rows": module.num_embeddings, "num_bad": len(bad)},
                confidence=1.0,
            )
    return None


def _failed_target(error: BaseException) -> Finding | None:
    """Read the targets from the frame of the cross entropy that failed."""
    for frame in _frames(error):
        scores, target = frame.f_locals.get("input"), frame.f_locals.get("target")
        if frame.f_code.co_name != "cross_entropy" or not isinstance(scores, Tensor) or not isinstance(target, Tensor):
            continue
        if target.is_floating_point() or scores.ndim < 1:
            return None
        classes = scores.shape[1] if scores.ndim > 1 else scores.shape[0]
        ignored = target == frame.f_locals.get("ignore_index", -100)
        bad = torch.nonzero(((target < 0) | (target >= classes)) & ~ignored)
        if not len(bad):
            return None
        place = bad[0].tolist()
        label = int(target[tuple(place)])
        return make_finding(
            "data.ids_out_of_range",
            f"Label {label} is outside the {classes} classes of the scores, at index {place}. On a GPU this is a "
            "device assert that ends the kernel's context.",
            where={"input": "target", "position": place[-1] if place else 0, "token_id": label},
            evidence={"num_classes": classes, "num_bad": len(bad)},
            confidence=1.0,
        )
    return None


def _frames(error: BaseException) -> list[FrameType]:
    """Return the frames of a traceback, innermost first."""
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames[::-1]


def find_ids_out_of_range(model: nn.Module, inputs: Mapping[str, Tensor]) -> Finding | None:
    """Return a finding when a token id or label lies outside the embedding or the output head."""
    getter = getattr(model, "get_input_embeddings", None)
    weight = getattr(getter() if getter is not None else None, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    rows = weight.shape[0]
    for name in ("input_ids", "labels", *(key for key in inputs if key.startswith("args["))):
        value = inputs.get(name)
        if not isinstance(value, Tensor) or value.is_floating_point() or value.ndim < 2:
            continue
        bad = (value >= rows) | ((value < 0) & ~torch.tensor(name == "labels", device=value.device))
        bad |= (value < 0) & (value != -100)
        if bool(bad.any()):
            first = torch.nonzero(bad)[0].tolist()
            token = int(value[tuple(first)])
            return make_finding(
                "data.ids_out_of_range",
                f"Token id {token} in {name!r} is outside the embedding ({rows} rows), batch row {first[0]}, position "
                f"{first[-1]}. On a GPU this is a device assert that ends the kernel's context.",
                where={"input": name, "batch_row": first[0], "position": first[-1], "token_id": token},
                evidence={"num_embedding_rows": rows},
                confidence=1.0,
            )
    return None
