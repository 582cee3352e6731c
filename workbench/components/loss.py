"""The only loss: the trainer, the evaluation and the trace all call ``compute_loss``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ModelError
from ..recipe import Recipe
from .checkpointing import run_checkpointed
from .task import CLASSIFICATION, SEQ2SEQ, task_of

IGNORE_INDEX = -100

# Tokens whose logits are alive at once in the chunked loss. 256 tokens of a vocabulary of 128k take 0.3 GiB with their
# float32 copies; smaller chunks are slower without saving anything that counts.
CHUNK_TOKENS = 256

# Settings by which known models change their logits after the output head.
_CAP = "final_logit_softcapping"  # Gemma: cap * tanh(logits / cap)
_FACTOR = "logit_scale"  # Cohere: logits * factor
_DIVISOR = "logits_scaling"  # Granite: logits / divisor


def compute_loss(
    recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor], num_items: Tensor | int | None
) -> Tensor:
    """Return the loss of one micro-batch: over its tokens, as transformers' ``ForCausalLMLoss``, or over its classes.

    Args:
        recipe: ``training.loss_type`` decides how it is computed, not what it is.
        model: The model of ``model.task``, with or without an adapter around it.
        batch: ``input_ids`` and ``labels`` (B, S), and what else the model takes (``attention_mask``,
            ``position_ids``). ``labels`` are not shifted; -100 is not learned. Of a classifier they are one class a
            row (B,), of an encoder-decoder the tokens of the answer (B, T).
        num_items: Supervised tokens of the whole optimizer step: the sum over this micro-batch is divided by it, so
            that micro-batches add up to the mean over tokens. None takes the mean over this micro-batch.

    Returns:
        A float32 scalar with a graph.
    """
    if not task_of(recipe).shifts_labels:
        logits = answer_logits(recipe, model, batch)
        return _plain_nll(logits, batch["labels"], num_items)
    if recipe.training.loss_type == "chunked_nll":
        return _chunked_nll(model, batch, num_items)
    if _accepts_loss_arguments(_causal_model(model)) and not _expects_images(model, batch):
        extra = {} if num_items is None else {"num_items_in_batch": num_items}
        return model(**batch, **extra).loss
    # Code from outside transformers often lacks num_items_in_batch and would average each micro-batch by itself.
    from transformers.loss.loss_utils import ForCausalLMLoss

    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    return ForCausalLMLoss(logits, batch["labels"], logits.shape[-1], num_items_in_batch=num_items)


def answer_logits(recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the logits (B, classes) of a classifier, or (B, T, vocabulary) of an encoder-decoder."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if recipe.model.task == SEQ2SEQ:
        # The decoder reads the answer moved right by one; each family begins it with a token of its own.
        inputs["decoder_input_ids"] = _decoder_inputs(_causal_model(model), batch["labels"])
    logits: Tensor = model(**inputs).logits
    return logits


def _decoder_inputs(model: Any, labels: Tensor) -> Tensor:
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        return own(labels=labels)
    config = model.config.get_text_config(decoder=True)
    start = getattr(model.config, "decoder_start_token_id", None)
    start = getattr(config, "bos_token_id", None) if start is None else start
    shifted = functional.pad(labels[:, :-1], (1, 0), value=0 if start is None else start)
    return shifted.masked_fill(shifted == IGNORE_INDEX, getattr(config, "pad_token_id", None) or 0)


def _plain_nll(logits: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
    """Return the cross-entropy of labels that stand for themselves: no label belongs to the place before it."""
    logits, labels = logits.float().flatten(0, -2), labels.reshape(-1)
    if num_items is None:
        return functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
    total = functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)


def evaluate_batch(recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of a batch and, of a classifier, how many rows it gets right (else None)."""
    if recipe.model.task != CLASSIFICATION:
        return compute_loss(recipe, model, batch, 1), None
    logits, labels = answer_logits(recipe, model, batch), batch["labels"]
    num_right = ((logits.argmax(-1) == labels) & (labels != IGNORE_INDEX)).sum()
    return _plain_nll(logits, labels, 1), num_right


def count_items(batches: Iterable[Mapping[str, Any]]) -> int:
    """Return the supervised tokens (or rows) of some batches.

    A token is predicted from the ones before it, so the first of a row never counts; a class of a row (B,) does.
    """
    labels = (batch["labels"] for batch in batches)
    return sum(int((each if each.ndim == 1 else each[..., 1:]).ne(IGNORE_INDEX).sum()) for each in labels)


def require_plain_head(model: nn.Module) -> None:
    """Check on two tokens that the chunked loss computes the same logits as the model's own forward.

    Raises:
        ModelError: The model does something to its logits that the chunked loss does not know.
    """
    causal = _causal_model(model)
    device = causal.get_input_embeddings().weight.device
    tokens = torch.zeros((1, 2), dtype=torch.long, device=device)
    was_training = causal.training
    causal.eval()
    try:
        with torch.no_grad():
            own = causal(input_ids=tokens, use_cache=False).logits.float()
            ours = _logits(causal, _hidden_states(causal, {"input_ids": tokens})).float()
    finally:
        causal.train(was_training)
    if own.shape != ours.shape or not torch.allclose(own, ours, rtol=1e-2, atol=1e-3):
        raise ModelError(
            f"{type(causal).__name__} changes its logits after the output head in a way the chunked loss does not "
            "know. Set training.loss_type=nll."
        )


def _causal_model(model: nn.Module) -> Any:
    """Return the causal model inside an adapter or what shares it among processes, or the model itself."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    inner = getattr(model, "get_base_model", None)
    return inner() if inner is not None else model


def _accepts_loss_arguments(causal: Any) -> bool:
    """Return whether ``num_items_in_batch`` reaches the model's loss; the trainer asks in the same way."""
    declared = getattr(causal, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = inspect.signature(type(causal).forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _expects_images(model: nn.Module, batch: Mapping[str, Tensor]) -> bool:
    """Return whether the model's own loss cuts places of images off the logits which this batch does not have.

    Source:
        ``GitForCausalLM.forward`` of transformers: it learns ``logits[:, num_image_tokens:]``, with images or without.
    """
    return "pixel_values" not in batch and _causal_model(model).config.model_type == "git"


def _hidden_states(causal: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the last hidden states (B, S, H) of the model without its output head."""
    return causal.base_model(**inputs, use_cache=False).last_hidden_state


def _logits(causal: Any, hidden: Tensor) -> Tensor:
    """Return the logits of hidden states, changed as the model's own forward changes them."""
    logits: Tensor = causal.get_output_embeddings()(hidden)
    config = causal.config.get_text_config()
    cap, factor, divisor = (getattr(config, name, None) for name in (_CAP, _FACTOR, _DIVISOR))
    if factor:
        logits = logits * factor
    if divisor:
        logits = logits / divisor
    if cap:
        logits = torch.tanh(logits / cap) * cap
    return logits


def _chunked_nll(model: nn.Module, batch: Mapping[str, Tensor], num_items: Tensor | int | None) -> Tensor:
    """Return the same loss without ever holding the logits of all tokens.

    The hidden states of the supervised tokens go through the output head in chunks; each chunk is checkpointed, so that
    backward computes its logits again instead of keeping them.
    """
    causal = _causal_model(model)
    hidden = _hidden_states(causal, {name: value for name, value in batch.items() if name != "labels"})
    labels = functional.pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[..., 1:].reshape(-1).to(hidden.device)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    # How many tokens are supervised is data; a trace takes as many as it is told.
    supervised = labels.ne(IGNORE_INDEX).nonzero().squeeze(-1)
    hidden, labels = hidden.index_select(0, supervised), labels.index_select(0, supervised)
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, labels.shape[0], CHUNK_TOKENS):
        piece = slice(start, start + CHUNK_TOKENS)
        total = total + run_checkpointed(_chunk_nll, causal, hidden[piece], labels[piece])
    if labels.shape[0] == 0:
        total = total + hidden.float().sum() * 0.0  # Keeps the graph, so that backward has something to do.
    count = labels.shape[0] if num_items is None else num_items
    if isinstance(count, Tensor):
        count = count.to(total.device)
    return total / count


def _chunk_nll(causal: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = _logits(causal, hidden).float()
    return functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
