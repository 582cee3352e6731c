"""Audits of rows and tokens: what is learned, what ends a row, what the ids are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..failures import find_ids_out_of_range
from ..finding import Finding, make_finding
from .subject import Subject, as_list, register

IGNORE = -100
MIN_REAL_SHARE = 0.5


@register
def generation_markers(subject: Subject) -> Finding | None:
    """Assistant-only loss needs a template that marks the assistant's turns."""
    masks = _assistant_masks(subject)
    if not masks:
        return None
    empty = sum(not any(mask) for _, mask in masks)
    if empty == len(masks):
        return make_finding(
            "data.no_generation_markers",
            f"The assistant mask is all zero for {empty} of {len(masks)} rows: the chat template has no generation "
            "markers. The run would train on 0 tokens.",
            where={"object": "tokenizer.chat_template"},
            evidence={"num_rows": len(masks)},
            confidence=1.0,
        )
    return None


@register
def end_of_turn(subject: Subject) -> Finding | None:
    """The token that ends the assistant's turn must be inside the learned span."""
    masks = _assistant_masks(subject)
    eos = getattr(subject.tokenizer, "eos_token_id", None)
    outside = inside = 0
    for ids, mask in masks:
        for index in range(len(ids)):
            ends = mask[index] and (index + 1 == len(ids) or not mask[index + 1])
            if ends and ids[index] == eos:
                inside += 1
            elif ends and index + 1 < len(ids) and ids[index + 1] == eos:
                outside += 1
    if not outside or inside >= outside:
        return None
    return make_finding(
        "data.eos_outside_span",
        f"The assistant span ends before its end-of-turn token in {outside} of {outside + inside} "
        f"turns: the stop token "
        "is never trained.",
        where={"object": "tokenizer.chat_template", "token_id": eos},
        evidence={"num_outside": outside, "num_inside": inside},
    )


def _assistant_masks(subject: Subject) -> list[tuple[list[int], list[int]]]:
    wants = subject.assistant_only_loss or bool(getattr(subject.args, "assistant_only_loss", False))
    if not wants or subject.tokenizer is None or not subject.rows or "messages" not in subject.rows[0]:
        return []
    found = []
    for row in subject.rows:
        try:
            rendered = subject.tokenizer.apply_chat_template(
                row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except (ValueError, TypeError):
            return []
        mask = rendered.get("assistant_masks")
        if mask is None:
            return []
        ids = rendered["input_ids"]
        nested = bool(ids) and isinstance(ids[0], list)
        found.append((as_list(ids[0] if nested else ids), as_list(mask[0] if nested else mask)))
    return found


def _labels(subject: Subject) -> tuple[Tensor, Tensor] | None:
    batch = subject.collated
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if isinstance(ids, Tensor) and isinstance(labels, Tensor) and ids.shape == labels.shape and ids.ndim == 2:
        return ids, labels
    return None


@register
def supervised_tokens(subject: Subject) -> Finding | None:
    """Each row needs a token that is learned after truncation."""
    pair = _labels(subject)
    if pair is None:
        return None
    counts = (pair[1][:, 1:] != IGNORE).sum(1)
    empty = torch.nonzero(counts == 0).flatten().tolist()
    if not empty:
        return None
    return make_finding(
        "data.no_supervised_tokens",
        f"{len(empty)} of {len(counts)} rows keep no supervised token after truncation: a batch of only such rows has "
        "a NaN loss.",
        where={"rows": tuple(empty[:10])},
        evidence={"num_rows": len(empty)},
        confidence=0.95,
    )


@register
def end_of_sequence(subject: Subject) -> Finding | None:
    """A row that ends with EOS must learn it."""
    pair, eos = _labels(subject), getattr(subject.tokenizer, "eos_token_id", None)
    if pair is None or eos is None or len(subject.token_rows) != len(pair[0]):
        return None
    ids, labels = pair
    ending = learned = 0
    for row, tokens in enumerate(subject.token_rows):
        if not tokens or tokens[-1] != eos:
            continue
        ending += 1
        # The real end is after as many EOS as the row itself has; padding may be the same token.
        places = torch.nonzero(ids[row] == eos).flatten()
        own = places[: tokens.count(eos)] if _pads_right(ids[row], tokens) else places[-tokens.count(eos) :]
        learned += int((labels[row][own] == eos).any())
    if ending < 2 or learned > 0:
        return None
    same = getattr(subject.tokenizer, "pad_token_id", None) == eos
    reason = f" because pad_token == eos_token ({subject.tokenizer.eos_token!r})" if same else ""
    return make_finding(
        "data.eos_not_learned",
        f"0 of {ending} end-of-sequence tokens are supervised{reason}: the model cannot learn to stop.",
        where={"object": "collator", "token_id": eos},
        evidence={"num_rows": ending},
        confidence=0.95,
    )


def _pads_right(row: Tensor, tokens: list[int]) -> bool:
    return row[: len(tokens)].tolist() == tokens


@register
def beginning_of_sequence(subject: Subject) -> Finding | None:
    """A row begins with one BOS, not two."""
    bos = getattr(subject.tokenizer, "bos_token_id", None)
    rows = [tokens for tokens in subject.token_rows if len(tokens) > 2]
    if bos is None or not rows or bos == getattr(subject.tokenizer, "eos_token_id", None):
        return None
    double = sum(tokens[0] == bos and tokens[1] == bos for tokens in rows)
    if double < 0.5 * len(rows):
        return _without_bos(subject, rows, bos)
    return make_finding(
        "data.double_bos",
        f"{double} of {len(rows)} rows begin with two {subject.tokenizer.bos_token!r}.",
        where={"token_id": bos},
        evidence={"num_rows": double},
    )


def _without_bos(subject: Subject, rows: list[list[int]], bos: int) -> Finding | None:
    """Find rows without the BOS that their own tokenizer puts before each text; many models expect none."""
    lacking = sum(tokens[0] != bos for tokens in rows)
    if lacking < 0.9 * len(rows):
        return None
    try:
        ids = as_list(subject.tokenizer("a")["input_ids"])
    except (TypeError, ValueError, KeyError):  # What splits images or sound takes no text.
        return None
    if not ids or ids[0] != bos:
        return None
    return make_finding(
        "data.no_bos",
        f"{lacking} of {len(rows)} rows do not begin with {subject.tokenizer.bos_token!r}, which their tokenizer puts "
        "before each text: the model has seen texts begin with it, and will see it again when it is used.",
        where={"token_id": bos},
        evidence={"num_rows": lacking},
        confidence=0.8,
    )


@register
def ids_in_range(subject: Subject) -> Finding | None:
    """Ids must be rows of the embedding."""
    if subject.model is None or subject.embedding is None:
        return None
    batch = {name: value for name, value in subject.collated.items() if isinstance(value, Tensor)}
    found = find_ids_out_of_range(subject.model, batch)
    if found is not None:
        return found
    pad, rows = getattr(subject.tokenizer, "pad_token_id", None), subject.embedding.shape[0]
    if pad is None or pad < rows:
        return None
    return make_finding(
        "data.ids_out_of_range",
        f"The pad token {subject.tokenizer.pad_token!r} has id {pad}, the embedding only {rows} rows.",
        where={"token_id": pad},
        evidence={"num_embedding_rows": rows},
        confidence=1.0,
    )


def _hidden_from(subject: Subject, labels: Tensor) -> Tensor:
    """Return where the attention mask hides a label's own token; nowhere for labels of another sequence."""
    mask = subject.collated.get("attention_mask")
    is_other = bool(getattr(getattr(subject.model, "config", None), "is_encoder_decoder", False))
    if is_other or not isinstance(mask, Tensor) or mask.shape != labels.shape:
        return torch.zeros_like(labels, dtype=torch.bool)
    return mask == 0


@register
def ignore_index(subject: Subject) -> Finding | None:
    """What is learned must be the row's own tokens."""
    pair = _labels(subject)
    if pair is None:
        return None
    ids, labels = pair
    learned = labels != IGNORE
    total = int(learned.sum())
    padding = int((learned & _hidden_from(subject, labels)).sum())
    if padding:
        return make_finding(
            "data.wrong_ignore_index",
            f"{100 * padding / total:.0f} % of the supervised labels are padding: what the attention mask hides is "
            f"learned, since its labels are not {IGNORE}.",
            evidence={"num_labels": padding},
        )
    wrong = learned & (labels != ids)
    if not total or int(wrong.sum()) < 0.05 * total:
        return None
    token, count = Counter(labels[wrong].tolist()).most_common(1)[0]
    if count < 0.8 * int(wrong.sum()):
        return None
    return make_finding(
        "data.wrong_ignore_index",
        f"{100 * count / total:.0f} % of the supervised labels are token id {token} where the row has other tokens: it "
        "looks like a wrong ignore index.",
        where={"token_id": token},
        evidence={"num_labels": count},
    )


@register
def response_marker(subject: Subject) -> Finding | None:
    """The ids of a marker must occur in rows whose text holds it."""
    marker, tokenizer = subject.response_template, subject.tokenizer
    if marker is None or tokenizer is None or not subject.token_rows:
        return None
    if isinstance(marker, str):
        ids = list(tokenizer(marker, add_special_tokens=False)["input_ids"])
        text = marker
    else:
        ids, text = as_list(marker), tokenizer.decode(as_list(marker))
    missing, context = 0, []
    for tokens in subject.token_rows:
        found = any(tokens[i : i + len(ids)] == ids for i in range(len(tokens) - len(ids) + 1))
        decoded = tokenizer.decode(tokens)
        if not found and text.strip() and text.strip() in decoded:
            missing += 1
            context = tokens
    if missing < 0.5 * len(subject.token_rows):
        return None
    return make_finding(
        "data.marker_not_found",
        f"The marker {text!r} with ids {ids} never occurs in {missing} rows although their text holds "
        f"it: in context it "
        "is tokenised differently.",
        where={"object": "response_template"},
        evidence={"marker_ids": tuple(ids), "row_ids": tuple(context[:24])},
    )


@register
def row_length(subject: Subject) -> Finding | None:
    """No row may be longer than the maximum."""
    if subject.max_length is None:
        return None
    mask, ids = subject.collated.get("attention_mask"), subject.collated.get("input_ids")
    lengths = mask.sum(1).tolist() if isinstance(mask, Tensor) and mask.ndim == 2 else []
    if not lengths and isinstance(ids, Tensor):
        lengths = [ids.shape[1]] * ids.shape[0]
    lengths = lengths or [len(tokens) for tokens in subject.token_rows]
    longest = max(lengths, default=0)
    if longest <= subject.max_length:
        return None
    row = lengths.index(longest)
    return make_finding(
        "oom.row_not_truncated",
        f"Row {row} has {longest} tokens although the maximum is {subject.max_length}: truncation is not applied.",
        where={"row": row},
        evidence={"num_tokens": longest, "max_length": subject.max_length},
        confidence=0.95,
    )


@register
def padding(subject: Subject) -> Finding | None:
    """Rows of a data set should not be padded, and packed rows should be full."""
    shares, widths = [], []
    for row in subject.rows:
        if "input_ids" not in row:
            return None
        width, mask = len(as_list(row["input_ids"])), row.get("attention_mask")
        real = sum(as_list(mask)) if mask is not None else _without_pad(subject, row)
        shares.append(real / max(1, width))
        widths.append(width)
    if len(shares) < 4 or sum(shares) / len(shares) >= (0.7 if subject.packing else MIN_REAL_SHARE):
        return None
    share = sum(shares) / len(shares)
    if subject.packing or bool(getattr(subject.args, "packing", False)):
        return make_finding(
            "speed.packing_underfilled",
            f"Packing is on but rows are only {100 * share:.0f} % full: the packer gets too few documents per call.",
            evidence={"real_fraction": share},
        )
    if len(set(widths)) > 1:
        return None
    return make_finding(
        "speed.padding_in_dataset",
        f"All rows of the data set have length {widths[0]} and only {100 * share:.0f} % of it is "
        f"real: padding is fixed in "
        "the data set, a dynamic collator cannot help.",
        evidence={"real_fraction": share, "length": widths[0]},
    )


def _without_pad(subject: Subject, row: Mapping[str, Any]) -> int:
    pad = getattr(subject.tokenizer, "pad_token_id", None)
    return sum(token != pad for token in as_list(row["input_ids"]))


@register
def worker_memory(subject: Subject) -> Finding | None:
    """Loader workers un-share a data set that is a list of Python objects."""
    workers = getattr(subject.dataloader, "num_workers", 0) or getattr(subject.args, "dataloader_num_workers", 0)
    source = subject.dataset if subject.dataset is not None else getattr(subject.dataloader, "dataset", None)
    if not workers or source is None:
        return None
    for name, value in [("", source), *getattr(source, "__dict__", {}).items()]:
        if isinstance(value, (list, dict)) and len(value) >= 50_000:
            return make_finding(
                "leak.worker_memory",
                f"{type(source).__name__}{'.' + name if name else ''} holds {len(value)} Python objects and "
                f"{workers} workers read it: reading un-shares their pages, so that memory grows in each worker.",
                where={"object": name or type(source).__name__},
                evidence={"num_objects": len(value), "num_workers": workers},
                confidence=0.85,
            )
    return None
