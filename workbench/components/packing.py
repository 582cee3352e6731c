"""Packing: samples joined to sequences of ``max_length`` without padding, and kept apart by their positions."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Model types whose code keeps packed samples apart, each measured by tests/integration/test_data_packing.py. Others
# do so silently or not: OPT, MPT, BLOOM and gpt-oss (transformers 5.24) do not hand the positions to their masks, and
# models with a recurrent state (Mamba, Qwen3-Next) have no mask at all.
ISOLATING_MODEL_TYPES = frozenset(
    {
        "cohere",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)


def require_isolation(config: PretrainedConfig, name: str) -> None:
    """Raise ModelError when packed samples would see each other in this model.

    Raises:
        ModelError: The model type was not measured to keep them apart, or it uses ALiBi positions.
    """
    text = config.get_text_config()
    if text.model_type not in ISOLATING_MODEL_TYPES or getattr(text, "alibi", False):
        raise ModelError(
            f"{name} is a {text.model_type} model, in which packed samples are not known to be kept apart. "
            "Set data.packing=false; data.group_by_length=true saves padding too."
        )


def pack_lengths(lengths: Sequence[int] | np.ndarray, max_length: int) -> list[list[int]]:
    """Return which samples share a sequence: best fit, longest first.

    Best fit leaves less empty space than joining in order (which would have to cut samples to fill up). The bins are
    kept by free space, so the cost is O(n * max_length) at worst and O(n) in practice.

    Args:
        lengths: Tokens of each sample, each at most ``max_length``.
        max_length: Tokens of a full sequence.

    Returns:
        Sequences as lists of sample indices; every index exactly once.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.size and int(lengths.max()) > max_length:
        raise ValueError(f"a sample of {int(lengths.max())} tokens does not fit into {max_length}")
    by_space: list[list[int]] = [[] for _ in range(max_length + 1)]  # bins with exactly this much free space
    bins: list[list[int]] = []
    spaces: list[int] = []  # free spaces that occur, ascending
    for sample in np.argsort(-lengths, kind="stable"):
        length = int(lengths[sample])
        place = bisect.bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces[place]
            index = by_space[space].pop()
            if not by_space[space]:
                spaces.pop(place)
        else:
            space, index = max_length, len(bins)
            bins.append([])
        bins[index].append(int(sample))
        left = space - length
        if left:
            if not by_space[left]:
                bisect.insort(spaces, left)
            by_space[left].append(index)
    return bins


def join_samples(samples: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``(input_ids, labels, position_ids)`` of one packed sequence, each int32, (total,).

    ``position_ids`` begin anew at 0 with each sample. transformers reads the borders off them when no attention mask
    and no cache are given, and masks attention across them (``find_packed_sequence_indices``, transformers
    5.24 masking_utils.py); that is why packed batches never carry a mask. The first label of a sample is ignored, so
    that no sample's first token is predicted from its neighbour's last.
    """
    ids = np.concatenate([sample[0] for sample in samples]).astype(np.int32)
    labels = np.concatenate([sample[1] for sample in samples]).astype(np.int32)
    positions = np.concatenate([np.arange(len(sample[0]), dtype=np.int32) for sample in samples])
    labels[positions == 0] = -100
    return ids, labels, positions
