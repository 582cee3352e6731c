"""The order of samples: a function of seed and epoch alone, so that a resumed run goes on where the first one was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

# Batches among which samples are sorted by length. More gives less padding and a less random order.
GROUPED_BATCHES = 50


class EpochSampler(Sampler[int]):
    """Random order, or random batches of samples of similar length.

    transformers' own samplers draw from the process-wide generator, so that the order depends on everything that drew
    before: after a resume the rest of an epoch would be another one.
    """

    def __init__(self, num_samples: int, seed: int, lengths: Sequence[int] | None = None, batch_size: int = 1) -> None:
        """Make a sampler.

        Args:
            num_samples: Samples of the training set.
            seed: Seed of the run.
            lengths: Tokens of each sample, to group by length; None shuffles only.
            batch_size: Samples of a micro-batch, for grouping.
        """
        self._num_samples = num_samples
        self._seed = seed
        self._lengths = lengths
        self._batch_size = batch_size
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is drawn next."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed((self._seed * 1_000_003 + self._epoch) % 2**63)
        order: list[int] = torch.randperm(self._num_samples, generator=generator).tolist()
        if self._lengths is None:
            return iter(order)
        return iter(self._grouped(order, generator))

    def _grouped(self, order: list[int], generator: torch.Generator) -> list[int]:
        lengths, size = self._lengths or (), self._batch_size
        stretch = size * GROUPED_BATCHES
        batches: list[list[int]] = []
        for start in range(0, len(order), stretch):
            near = sorted(order[start : start + stretch], key=lambda index: lengths[index], reverse=True)
            batches += [near[first : first + size] for first in range(0, len(near), size)]
        # The short rest stays last, so that every other batch is full.
        rest = [batches.pop()] if batches and len(batches[-1]) < size else []
        shuffled = [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]
        if shuffled:
            # The longest batch first: a batch that does not fit shows at once and not after hours.
            longest = max(range(len(shuffled)), key=lambda place: lengths[shuffled[place][0]])
            shuffled.insert(0, shuffled.pop(longest))
        return [index for batch in [*shuffled, *rest] for index in batch]
