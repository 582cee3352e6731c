"""The training scripts behind the published rows, as far as they differ from our trainer in what they keep alive."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.estimate.script import Script
from workbench.recipe import Recipe

from . import kernels
from .row import Row


def _own_loss(recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """``out = model(**batch)``, as a plain loop writes it."""
    outputs = model(**batch)
    return outputs.loss, outputs


def _shifted_loss(recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """transformers up to 4.48: float32 logits, then a shifted copy of them.

    Source:
        ForCausalLMLoss of transformers 4.48, and the forward methods before 4.45.
    """
    logits = model(**_inputs(batch)).logits
    upcast = logits.float()
    shifted = upcast[..., :-1, :].contiguous()
    labels = batch["labels"][..., 1:].contiguous().view(-1)
    return functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels), None


def _fused_shifted_loss(
    recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor], *, frees_logits: bool
) -> tuple[Tensor, Any]:
    """The same with the Triton cross entropy, which writes its gradient over the shifted copy.

    ``frees_logits``: before transformers 4.46 the forward method itself wrote ``logits = logits.float()``.
    """
    logits = model(**_inputs(batch)).logits
    upcast = logits.float()
    if frees_logits:
        del logits
    shifted = upcast[..., :-1, :].contiguous()
    return kernels.fused_cross_entropy(shifted.view(-1, shifted.shape[-1])), None


def _liger_loss(recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """Liger's fused head and loss over the hidden states."""
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    hidden = causal.model(**_inputs(batch), use_cache=False).last_hidden_state
    hidden = hidden[..., :-1, :].contiguous()
    return kernels.fused_head_loss(hidden.view(-1, hidden.shape[-1]), causal.lm_head.weight), None


def _chunked_head_loss(recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """LitGPT with ``lm_head_chunk_size=128``: the head and the cross entropy in chunks, all of them kept for backward.

    Source:
        litgpt/finetune/lora.py and ``chunked_cross_entropy`` in litgpt/utils.py.
    """
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    hidden = causal.base_model(**_inputs(batch), use_cache=False).last_hidden_state
    head = causal.get_output_embeddings()
    logits = [_capped(causal, head(piece)) for piece in hidden.split(128, dim=1)]
    logits[-1] = logits[-1][..., :-1, :]
    labels = batch["labels"][..., 1:]
    pieces = labels.split(128, dim=1)
    losses = [
        functional.cross_entropy(part.reshape(-1, part.shape[-1]), label.reshape(-1), reduction="none")
        for part, label in zip(logits, pieces, strict=True)
    ]
    return torch.cat(losses).sum() / labels.numel(), logits


def _chunked_cross_entropy(recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """LitGPT's full fine-tuning: logits of all tokens, their cross entropy in chunks of 128."""
    logits = model(**_inputs(batch)).logits[..., :-1, :]
    logits = logits.reshape(-1, logits.shape[-1])
    labels = batch["labels"][..., 1:].reshape(-1)
    losses = [
        functional.cross_entropy(part, label, reduction="none")
        for part, label in zip(logits.split(128), labels.split(128), strict=True)
    ]
    return torch.cat(losses).sum() / labels.numel(), logits


def _classify(recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """BERT with two labels; the page passes neither mask nor token types."""
    labels = torch.empty(batch["input_ids"].shape[0], dtype=torch.long, device="meta")
    outputs = model(input_ids=batch["input_ids"], labels=labels)
    return outputs.loss, outputs


def _capped(causal: Any, logits: Tensor) -> Tensor:
    cap = getattr(causal.config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits


def _inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def _require_input_grads(model: nn.Module) -> nn.Module:
    model.enable_input_require_grads()  # type: ignore[operator]
    return model


def _as_classifier(model: nn.Module) -> nn.Module:
    from transformers import BertForSequenceClassification

    config: Any = copy.deepcopy(model.config)
    config.num_labels, config.is_decoder = 2, False
    config._attn_implementation = "eager"
    with torch.device("meta"):
        classifier: nn.Module = BertForSequenceClassification(config)
    if getattr(model, "is_gradient_checkpointing", False):
        classifier.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": True}
        )
    return classifier.train()


PLAIN = Script("plain loop", _own_loss, True, warms_up=False)
OLD_TRAINER = Script("transformers before 4.48", _shifted_loss, warms_up=False)
_BERT = Script("bert classifier", _classify, adapt=_as_classifier, warms_up=False)


@functools.cache
def _fitcheck(is_sdpa: bool, is_quantized: bool) -> Script:
    return Script(
        f"fitcheck sdpa={is_sdpa} quantized={is_quantized}",
        _own_loss,
        keeps_outputs=True,
        adapt=_require_input_grads,
        sdpa_kernel="efficient" if is_sdpa else None,
        warms_up=is_quantized,
        loads_ahead=True,
        empties_cache=False,
        rotates_by_product=True,
    )


def fitcheck(row: Row) -> Script:
    """Return the script of a fitcheck row: only a quantised model is loaded through a device map.

    Threads read its weights ahead, and nothing empties the cache. For torch 2.10 transformers 5.0 and peft 0.19 say so.
    For torch 2.14 the text of transformers 5.17 and peft 0.20 says otherwise, the rows do not: what is allocated after
    loading differs from run to run of one model, and only so do the models without slack have the reserved bytes that
    were read.
    """
    return _fitcheck(row["attn_impl"] != "eager", row["quantization"] is not None)


def bert(row: Row) -> Script:
    """Return the script of the BERT page."""
    return _BERT


@functools.cache
def _fms(is_fused: bool, is_liger: bool, is_gptq: bool, frees_logits: bool, casts_back: bool) -> Script:
    name = f"fms fused={is_fused} liger={is_liger} gptq={is_gptq} frees={frees_logits} casts={casts_back}"

    def adapt(model: nn.Module) -> nn.Module:
        if is_gptq:
            kernels.quantize_gptq(model)
        if is_fused:
            kernels.fuse_norms(model)
        return _without_window(_cast_back(model) if casts_back else model)

    if is_liger:
        forward: Any = _liger_loss
    elif is_fused:
        forward = functools.partial(_fused_shifted_loss, frees_logits=frees_logits)
    else:
        forward = _shifted_loss
    if not is_fused:
        return Script(name, forward, adapt=adapt, warms_up=False)
    return Script(name, forward, adapt=adapt, around=kernels.fused_rotary, warms_up=False)


def fms(row: Row, *, is_fused: bool, is_liger: bool, is_gptq: bool) -> Script:
    """Return the script of an fms-acceleration row."""
    casts_back = "prepare_model_for_kbit" in (row["quantization"] or "")
    return _fms(is_fused, is_liger, is_gptq, "transformers 4.45" in (row["versions"] or ""), casts_back)


def _without_window(model: nn.Module) -> nn.Module:
    """flash_attention_2 takes Mistral's window of 4096 as an argument; sdpa would be given a mask for it."""
    for module in model.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = None
    model.config.sliding_window = None  # type: ignore[union-attr]  # a transformers config
    return model


def _cast_back(model: nn.Module) -> nn.Module:
    """TRL's ``peft_module_casting_to_bf16``: embeddings and head go back to bfloat16, norms stay in float32.

    Source:
        trl/trainer/utils.py of trl 0.13; the rows' resident bytes are those of float32 norms and nothing more.
    """
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    for module in (causal.get_input_embeddings(), causal.get_output_embeddings()):
        module.to(torch.bfloat16)
    return model


def litgpt(row: Row) -> Script:
    """Return the script of a LitGPT row: its head is untied and, with an adapter, computed in chunks."""
    forward: Any = _chunked_head_loss if row["method"] != "full" else _chunked_cross_entropy
    if row["quantization"] is None:
        return Script(f"litgpt {row['method']}", forward, True, _untie, warms_up=False)
    kept: list[Tensor] = []
    return Script(
        f"litgpt {row['method']} nf4",
        functools.partial(_two_generations, forward=forward, kept=kept),
        True,
        lambda model: _keep_inputs(_untie(model), kept),
        warms_up=False,
    )


def _keep_inputs(model: nn.Module, kept: list[Tensor]) -> nn.Module:
    """Let every 4-bit product keep its input as an attribute of its graph node, as bitsandbytes 0.42 does.

    Releasing the graph does not release such an attribute: it lives until the iteration's loss is assigned again, at
    the end of the next forward pass. What the last iteration kept is made beside what this one keeps.

    Source:
        ``MatMul4Bit.forward``, bitsandbytes/autograd/_functions.py 0.42, which LitGPT of 2024 requires.
    """
    import bitsandbytes

    last: list[Any] = [None]

    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        node: Any = output.grad_fn
        if node is None:
            return
        node.kept = args[0]
        if last[0] is None or last[0]() is not args[0]:  # query, key and value share one input
            last[0] = weakref.ref(args[0])
            kept.append(torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device))

    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.register_forward_hook(keep)
    return model


def _two_generations(
    recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor], *, forward: Any, kept: list[Tensor]
) -> tuple[Tensor, Any]:
    loss, outputs = forward(recipe, model, batch)
    kept.clear()  # the loss of the last iteration was held until here
    return loss, outputs


def _untie(model: nn.Module) -> nn.Module:
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    head, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()
    head = getattr(head, "base_layer", head)
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=head.weight.requires_grad)
    return model
