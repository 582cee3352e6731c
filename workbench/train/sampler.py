"""The order of samples: a function of seed and epoch alone, so that a resumed run goes on where the first one was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from ..components.sampling import Floats, sample_probabilities
from ..recipe import Recipe

# Batches among which samples are sorted by length. More gives less padding and a less random order.
GROUPED_BATCHES = 50


class EpochSampler(Sampler[int]):
    """Random order, random batches of samples of similar length, or draws with replacement by probability.

    transformers' own samplers draw from the process-wide generator, so that the order depends on everything that drew
    before: after a resume the rest of an epoch would be another one.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        lengths: Sequence[int] | None = None,
        batch_size: int = 1,
        probabilities: Floats | None = None,
    ) -> None:
        """Make a sampler.

        Args:
            num_samples: Samples of the training set.
            seed: Seed of the run.
            lengths: Tokens of each sample, to group by length; None shuffles only.
            batch_size: Samples of a micro-batch, for grouping.
            probabilities: Of each sample in a draw, shape (samples,); None takes each sample once an epoch.
        """
        self._num_samples = num_samples
        self._seed = seed
        self._lengths = lengths
        self._batch_size = batch_size
        # The last border is 1 whatever the rounding: no draw may fall behind it.
        self._borders = None if probabilities is None else torch.from_numpy(np.cumsum(probabilities)[:-1])
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is drawn next."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed((self._seed * 1_000_003 + self._epoch) % 2**63)
        if self._borders is not None:
            draws = torch.rand(self._num_samples, dtype=torch.float64, generator=generator)
            drawn: list[int] = torch.searchsorted(self._borders, draws, right=True).tolist()
            return iter(drawn)
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


def sampler_of(recipe: Recipe, samples: Any, *, num_processes: int = 1) -> EpochSampler:
    """Return the sampler of a run.

    Args:
        recipe: Seed, grouping and balance.
        samples: The training set, with a column ``length`` and, of a classifier, ``labels``.
        num_processes: Processes that share the samples of each step.
    """
    # Grouped by the effective batch, as transformers does: the order stays when a smaller micro-batch with more
    # accumulation takes over in the middle of the run.
    return EpochSampler(
        len(samples),
        recipe.training.seed,
        list(samples["length"]) if recipe.data.group_by_length else None,
        recipe.training.effective_batch_size * num_processes,
        sample_probabilities(recipe, samples),
    )
