"""Samples to batches: padding on the right, marked by length and never by the pad token's id.

Many chat models pad with their EOS token (SmolLM2 does). Telling padding apart by id would then also hide every real
EOS from the loss, and the model would never learn to stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..recipe import Recipe
from .encoding import IGNORED

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Collator:
    """Makes a batch of CPU tensors from a list of samples. Plain data, so that loader workers can have it.

    Attributes:
        pad_token_id: What fills up; it is never learned and never attended to.
        length: Every batch is padded to this length; None pads to the longest sample of the batch.
    """

    pad_token_id: int
    length: int | None = None

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Return ``input_ids`` and ``labels`` (B, S), int64, with what the model needs besides.

        ``attention_mask`` (B, S) is there only when something is padded: a mask changes the attention kernel. Packed
        samples bring ``position_ids`` (B, S), which keep samples apart, and never a mask: with one, transformers would
        no longer see the borders. Their padding gets position 0 each, so that every pad token sees itself only.
        """
        import torch

        lengths = [len(sample["input_ids"]) for sample in samples]
        width = max([*lengths, self.length or 0])
        is_packed = "position_ids" in samples[0]
        batch = {
            "input_ids": torch.full((len(samples), width), self.pad_token_id, dtype=torch.long),
            "labels": torch.full((len(samples), width), IGNORED, dtype=torch.long),
        }
        if is_packed:
            batch["position_ids"] = torch.zeros((len(samples), width), dtype=torch.long)
        elif min(lengths) < width:
            batch["attention_mask"] = torch.zeros((len(samples), width), dtype=torch.long)
        for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
            for name in ("input_ids", "labels", "position_ids"):
                if name in batch:
                    batch[name][row, :length] = torch.as_tensor(sample[name], dtype=torch.long)
            if "attention_mask" in batch:
                batch["attention_mask"][row, :length] = 1
        return batch


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one batch: real ones, padding, and the ones that are learned."""

    num_tokens: int
    num_padding_tokens: int
    num_supervised_tokens: int


def count_tokens(batch: Mapping[str, Any]) -> TokenCounts:
    """Return what a batch of the Collator holds. Tensors may lie on any device (one synchronisation)."""
    ids = batch["input_ids"]
    total = ids.numel()
    if "attention_mask" in batch:
        real = int(batch["attention_mask"].sum())
    elif "position_ids" in batch:
        # Padding of a packed row is its trailing run of zeros; samples of one token are never packed.
        import torch

        positions = batch["position_ids"]
        places = torch.arange(1, positions.shape[1] + 1, device=positions.device)
        real = int(((positions != 0) * places).amax(dim=1).sum())
    else:
        real = total
    # The model predicts each token from the ones before it, so the first label of a row is never used.
    supervised = int((batch["labels"][:, 1:] != IGNORED).sum())
    return TokenCounts(real, total - real, supervised)


def build_collator(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Collator:
    """Return the Collator that ``recipe`` asks for."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad = next(token for token in candidates if token is not None)
    is_fixed = recipe.data.padding == "max_length" and not recipe.data.packing
    return Collator(int(pad), recipe.data.max_length if is_fixed else None)
