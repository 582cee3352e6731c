"""Grades: what an export lost against the merged model it was made from, on rows that did not train.

Both read the same tokens; so the difference is the format's alone, however few the rows are.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..components.collator import build_collator
from ..components.data import PreparedData
from ..errors import ExportError
from ..events import Cancel
from ..recipe import Recipe

GRADE_ROWS = 8
# Rows that are read at once. ONNX graphs are made from a batch of two, so this shows that they take one.
ROWS_AT_ONCE = 2
# Rows are cut here, so that the logits of a batch stay below half a gigabyte for a vocabulary of 128k.
GRADE_TOKENS = 512
# Positions whose logits are kept and compared.
KEPT_POSITIONS = 256
IGNORED = -100

# What a sound export differs by at most: mean difference of the logits as a share of their spread, by the bits of its
# weights. Rounding to 4 bits took 0.2 of tiny models; weights in the wrong order give more than 1.
MAX_DIFFERENCE = {32: 0.02, 16: 0.1, 8: 0.3, 4: 0.7}

# (input_ids, attention_mask), int64 (B, S) each -> logits (B, S, vocabulary)
Reader = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class GradedRows:
    """Rows an export is graded on.

    Attributes:
        batches: ``input_ids``, ``attention_mask`` and ``labels`` (B, S) each; labels are not shifted, -100 is not
            learned.
        origin: ``"held-out"``, or ``"training"`` where nothing was held out.
    """

    batches: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
    origin: str

    @property
    def num_rows(self) -> int:
        """Return how many rows there are."""
        return sum(len(ids) for ids, _, _ in self.batches)


@dataclass(frozen=True)
class Measured:
    """What one model says of the rows.

    Attributes:
        perplexity: Of the supervised tokens.
        accuracy_fraction: Of the supervised tokens, those that got the highest logit.
        num_tokens: Supervised tokens.
        tokens_per_s: Tokens read per second, whole rows at once, after one reading to warm up.
        logits: float32 (positions, vocabulary) of the first supervised positions of each batch.
    """

    perplexity: float
    accuracy_fraction: float
    num_tokens: int
    tokens_per_s: float
    logits: torch.Tensor


@dataclass(frozen=True)
class Grade:
    """An export against its merged model. Plain data.

    Attributes:
        num_bytes: Bytes of the export's weights.
        merged_num_bytes: Bytes of the merged model's weights.
        compression: ``merged_num_bytes / num_bytes``.
        perplexity, merged_perplexity: On the same rows.
        accuracy_fraction, merged_accuracy_fraction: Of the supervised tokens, those that got the highest logit.
        mean_logit_difference: Mean absolute difference of the logits.
        logit_std: Spread of the merged model's logits.
        mean_divergence: Mean Kullback-Leibler divergence of the next token, nats.
        same_next_token_fraction: Of the compared positions, those with the same most likely token.
        tokens_per_s, merged_tokens_per_s: Tokens read per second on the machine that made the export.
        reader: What read the export back.
        rows: Where the rows come from: ``"held-out"`` or ``"training"``.
        num_rows: How many.
        num_tokens: Supervised tokens in them.
    """

    num_bytes: int
    merged_num_bytes: int
    compression: float
    perplexity: float
    merged_perplexity: float
    accuracy_fraction: float
    merged_accuracy_fraction: float
    mean_logit_difference: float
    logit_std: float
    mean_divergence: float
    same_next_token_fraction: float
    tokens_per_s: float
    merged_tokens_per_s: float
    reader: str
    rows: str
    num_rows: int
    num_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)


def choose_rows(recipe: Recipe, tokenizer: Any, data: PreparedData, num_rows: int = GRADE_ROWS) -> GradedRows:
    """Return the first held-out rows of a run, or of its training rows where none were held out."""
    held_out = data.evaluation is not None and len(data.evaluation) > 0
    rows: Any = data.evaluation if held_out else data.train
    collate = build_collator(recipe, tokenizer)
    samples = []
    for index in range(min(num_rows, len(rows))):
        row = rows[index]
        samples.append({name: row[name][:GRADE_TOKENS] for name in ("input_ids", "labels")})
    samples.sort(key=lambda sample: len(sample["input_ids"]))
    batches = []
    for start in range(0, len(samples), ROWS_AT_ONCE):
        batch = collate(samples[start : start + ROWS_AT_ONCE])
        mask = batch.get("attention_mask")
        ids = batch["input_ids"]
        batches.append((ids, torch.ones_like(ids) if mask is None else mask, batch["labels"]))
    return GradedRows(tuple(batches), "held-out" if held_out else "training")


def measure_reader(read: Reader, rows: GradedRows, cancel: Cancel | None = None) -> Measured:
    """Let a model read the rows.

    Raises:
        ExportError: Its logits are not finite, or nothing is supervised.
        Cancelled: The user cancelled.
    """
    loss, right, count, num_read, seconds = 0.0, 0, 0, 0, 0.0
    kept: list[torch.Tensor] = []
    share = max(1, KEPT_POSITIONS // max(1, len(rows.batches)))
    with torch.no_grad():
        read(*rows.batches[0][:2])
        for ids, mask, labels in rows.batches:
            if cancel is not None:
                cancel.check()
            started = time.perf_counter()
            logits = read(ids, mask)
            seconds += time.perf_counter() - started
            num_read += int(mask.sum())
            wanted = labels[:, 1:]
            chosen = wanted != IGNORED
            picked, answers = logits[:, :-1][chosen.to(logits.device)].float().cpu(), wanted[chosen]
            loss += float(torch.nn.functional.cross_entropy(picked, answers, reduction="sum"))
            right += int((picked.argmax(-1) == answers).sum())
            count += len(answers)
            kept.append(picked[:share].clone())
    if not count:
        raise ExportError("The rows to grade with have no supervised token. Raise data.max_length.")
    if not math.isfinite(loss):
        raise ExportError("The export's logits are not finite. Nothing was kept; export another format.")
    return Measured(math.exp(min(loss / count, 700.0)), right / count, count, num_read / seconds, torch.cat(kept))


def compare_measured(
    measured: Measured, merged: Measured, rows: GradedRows, num_bytes: tuple[int, int], reader: str
) -> Grade:
    """Return the grade of an export.

    Args:
        measured: What the export says of ``rows``.
        merged: What the merged model says of them.
        rows: The rows.
        num_bytes: Bytes of the weights of the export and of the merged model.
        reader: What read the export.
    """
    before, after = merged.logits, measured.logits
    log_before = torch.log_softmax(before, -1)
    divergence = (log_before.exp() * (log_before - torch.log_softmax(after, -1))).sum(-1)
    return Grade(
        num_bytes=num_bytes[0],
        merged_num_bytes=num_bytes[1],
        compression=num_bytes[1] / max(1, num_bytes[0]),
        perplexity=measured.perplexity,
        merged_perplexity=merged.perplexity,
        accuracy_fraction=measured.accuracy_fraction,
        merged_accuracy_fraction=merged.accuracy_fraction,
        mean_logit_difference=float((after - before).abs().mean()),
        logit_std=float(before.std()),
        mean_divergence=max(0.0, float(divergence.mean())),
        same_next_token_fraction=float((after.argmax(-1) == before.argmax(-1)).float().mean()),
        tokens_per_s=measured.tokens_per_s,
        merged_tokens_per_s=merged.tokens_per_s,
        reader=reader,
        rows=rows.origin,
        num_rows=rows.num_rows,
        num_tokens=measured.num_tokens,
    )


def require_sound(grade: Grade, to: str, bits: int) -> None:
    """Refuse an export that answers otherwise than its source by more than its rounding explains.

    Raises:
        ExportError: It does.
    """
    share = grade.mean_logit_difference / max(grade.logit_std, 1e-12)
    if not share <= MAX_DIFFERENCE[bits]:
        raise ExportError(
            f"The {to} export that was read back answers otherwise than the merged model: its logits differ by "
            f"{share:.2f} of their spread on average, and rounding to {bits} bits explains {MAX_DIFFERENCE[bits]}. "
            "Nothing was kept; export it as merged, or in more bits."
        )


def weight_bytes(folder: Path) -> int:
    """Return the bytes of the weights in a folder: what is neither text nor a tokenizer."""
    kinds = (".safetensors", ".gguf", ".onnx", ".data", ".bin")
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix in kinds)


def save_rows(rows: GradedRows, path: Path) -> None:
    """Write rows for another process."""
    arrays = {}
    for index, batch in enumerate(rows.batches):
        for name, tensor in zip(("ids", "mask", "labels"), batch, strict=True):
            arrays[f"{name}{index}"] = tensor.numpy()
    np.savez(path, origin=np.array(rows.origin), **arrays)  # type: ignore[arg-type]  # stubs take arrays for the flag


def load_rows(path: Path) -> GradedRows:
    """Read what ``save_rows`` wrote."""
    with np.load(path) as stored:
        count = sum(name.startswith("ids") for name in stored.files)
        batches = tuple(
            tuple(torch.from_numpy(stored[f"{name}{index}"]) for name in ("ids", "mask", "labels"))
            for index in range(count)
        )
        return GradedRows(batches, str(stored["origin"]))  # type: ignore[arg-type]  # three tensors each
