"""How much of a batch is padding under each choice, computed from the lengths alone, and the histogram of lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .packing import pack_lengths

# Packing is simulated on at most this many samples, so that the figure stays instant on large data.
MAX_SAMPLES = 20_000


@dataclass(frozen=True)
class PaddingShares:
    """Share of all tokens in batches that is padding, 0 to 1, under each choice.

    Attributes:
        longest: Each batch padded to its longest sample, samples in random order.
        group_by_length: The same with samples of similar length together.
        max_length: Every sample padded to ``max_length``.
        packing: Samples joined, the rest of each sequence empty.
    """

    longest: float
    group_by_length: float
    max_length: float
    packing: float


@dataclass(frozen=True)
class Histogram:
    """Counts of lengths: ``counts[i]`` samples have at least ``edges[i]`` and fewer than ``edges[i + 1]`` tokens."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


def padding_shares(lengths: np.ndarray, *, max_length: int, batch_size: int, seed: int) -> PaddingShares:
    """Return the share of padding under each choice.

    Args:
        lengths: Tokens of each sample after cutting, (n,).
        max_length: Longest sample allowed.
        batch_size: Samples in one forward pass.
        seed: Seed of the random order.
    """
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(np.asarray(lengths, dtype=np.int64))[:MAX_SAMPLES]
    real = int(shuffled.sum())
    ordered = np.sort(shuffled)[::-1]
    num_packed = len(pack_lengths(shuffled, max_length))
    return PaddingShares(
        longest=_share(real, _padded_tokens(shuffled, batch_size)),
        group_by_length=_share(real, _padded_tokens(ordered, batch_size)),
        max_length=_share(real, shuffled.size * max_length),
        packing=_share(real, num_packed * max_length),
    )


def length_histogram(lengths: np.ndarray, num_bins: int = 40) -> Histogram:
    """Return how many samples have which length, in at most ``num_bins`` bins of whole tokens."""
    longest = int(lengths.max())
    width = max(1, -(-(longest + 1) // num_bins))
    edges = np.arange(0, longest + width + 1, width)
    counts, _ = np.histogram(lengths, bins=edges)
    return Histogram(tuple(float(edge) for edge in edges), tuple(int(count) for count in counts))


def _padded_tokens(lengths: np.ndarray, batch_size: int) -> int:
    """Return the tokens of all batches, padding included, when each batch is as long as its longest sample."""
    starts = np.arange(0, lengths.size, batch_size)
    longest = np.maximum.reduceat(lengths, starts)
    sizes = np.minimum(batch_size, lengths.size - starts)
    return int((longest * sizes).sum())


def _share(real: int, total: int) -> float:
    return 1 - real / total
