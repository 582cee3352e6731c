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
from .images import open_image
from .task import CAUSAL, CLASSIFICATION, IMAGE_TEXT, SEQ2SEQ
from .task_data import TASK

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    Batch = dict[str, torch.Tensor]
# What some models take for each token beside its id; padding gets 0.
TOKEN_COLUMNS = ("token_type_ids", "mm_token_type_ids")
LABEL_KINDS = {CAUSAL: "tokens", IMAGE_TEXT: "tokens", SEQ2SEQ: "answer", CLASSIFICATION: "class"}


@dataclass(frozen=True)
class Collator:
    """Makes a batch of CPU tensors from a list of samples. Plain data, so that loader workers can have it.

    Attributes:
        pad_token_id: What fills up; it is never learned and never attended to.
        length: Every batch is padded to this length; None pads to the longest sample of the batch.
        labels: ``"tokens"``, one a token, predicted from the ones before; ``"answer"``, the tokens of another text;
            ``"class"``, one a row.
    """

    pad_token_id: int
    length: int | None = None
    labels: str = "tokens"

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Return ``input_ids`` and ``labels`` (B, S), int64, with what the model needs besides.

        The labels of a classifier are (B,), those of an encoder-decoder (B, T).

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
            "labels": self._labels(samples, width),
        }
        for name in TOKEN_COLUMNS:
            if name in samples[0]:
                batch[name] = torch.zeros((len(samples), width), dtype=torch.long)
        if TASK in samples[0]:
            batch[TASK] = torch.tensor([int(sample[TASK]) for sample in samples], dtype=torch.long)
        if is_packed:
            batch["position_ids"] = torch.zeros((len(samples), width), dtype=torch.long)
        elif min(lengths) < width:
            batch["attention_mask"] = torch.zeros((len(samples), width), dtype=torch.long)
        for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
            for name in ("input_ids", *TOKEN_COLUMNS, "position_ids"):
                if name in batch:
                    batch[name][row, :length] = torch.as_tensor(sample[name], dtype=torch.long)
            if "attention_mask" in batch:
                batch["attention_mask"][row, :length] = 1
        return batch

    def _labels(self, samples: Sequence[Mapping[str, Any]], width: int) -> torch.Tensor:
        import torch

        rows = [torch.as_tensor(sample["labels"], dtype=torch.long) for sample in samples]
        if self.labels == "class":
            return torch.cat(rows)
        if self.labels == "answer":
            width = max(len(row) for row in rows) if self.length is None else self.length
        labels = torch.full((len(rows), width), IGNORED, dtype=torch.long)
        for index, row in enumerate(rows):
            labels[index, : len(row)] = row
        return labels

    def count(self, batch: Mapping[str, Any]) -> TokenCounts:
        """Return what a batch holds."""
        return count_tokens(batch, shifts_labels=self.labels == "tokens")


@dataclass(frozen=True)
class ImageCollator(Collator):
    """A Collator that also opens the images of its samples.

    Attributes:
        image_processor: Of the model's processor; its outputs that the model takes join the batch.
    """

    image_processor: Any = None

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Return the batch of the Collator with ``pixel_values`` and what else the model takes of its images."""
        batch = super().__call__(samples)
        images = [[open_image(_image_ref(each)) for each in sample.get("images") or ()] for sample in samples]
        if any(images):
            found = self.image_processor(images=[each for each in images if each], return_tensors="pt")
            wanted = set(self.image_processor.model_input_names)
            batch |= {name: value for name, value in found.items() if name in wanted}
        return batch


def _image_ref(stored: Mapping[str, Any]) -> str | bytes:
    path = stored.get("path")
    return str(path) if path is not None else bytes(stored["bytes"])


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one batch: real ones, padding, and the ones that are learned."""

    num_tokens: int
    num_padding_tokens: int
    num_supervised_tokens: int


def count_tokens(batch: Mapping[str, Any], *, shifts_labels: bool = True) -> TokenCounts:
    """Return what a batch of the Collator holds. Tensors may lie on any device (one synchronisation).

    Args:
        batch: From the Collator.
        shifts_labels: Whether each label is predicted from the tokens before it, so that a row's first is never used.
    """
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
    labels = batch["labels"]
    supervised = int(((labels[:, 1:] if shifts_labels and labels.ndim > 1 else labels) != IGNORED).sum())
    return TokenCounts(real, total - real, supervised)


def build_collator(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Collator:
    """Return the Collator that ``recipe`` asks for."""
    is_image = recipe.model.task == IMAGE_TEXT
    words = tokenizer.tokenizer if is_image else tokenizer
    candidates = (words.pad_token_id, words.eos_token_id, 0)
    pad = next(token for token in candidates if token is not None)
    is_fixed = recipe.data.padding == "max_length" and not recipe.data.packing
    length = recipe.data.max_length if is_fixed else None
    kind = LABEL_KINDS[recipe.model.task]
    if is_image:
        return ImageCollator(int(pad), length, kind, tokenizer.image_processor)
    return Collator(int(pad), length, kind)
