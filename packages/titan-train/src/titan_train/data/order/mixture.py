"""Which source a sample comes from: exact counts in every block, at any index, without an index file.

Samples are cut into blocks of B. Every block holds ``c_k`` samples of source k, where the ``c_k`` are ``B * p_k``
rounded by largest remainder, so they sum to B and the mix never drifts. Which places of the block belong to which
source is one permutation of the block, drawn from the seed and the block's number. A source's samples are taken in its
own order: its sequence of samples does not depend on what it is mixed with.

B is the smallest power of two, at least 2048, that gives the rarest source 64 places: its share is then right to
1/128. The place table of a block is made when the block is entered (60 ns a sample) and kept for the last few blocks.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from titan_train.data.order.permutation import IndexArray, permute

_MIN_BLOCK = 2048
_MIN_COUNT = 64
# A table of this many places takes 6 MiB; rarer sources than 64 in a million are refused.
_MAX_BLOCK = 2**20


class Mixture:
    """Places of sources in the stream of samples.

    Args:
        names: Names of the sources; only their order within this object matters, not the draw of their own samples.
        weights: Positive weights, one per source.
        seed: Seed of the places.

    Raises:
        ValueError: If a weight is below 64 in a million of the sum.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float], seed: int) -> None:
        total = sum(weights)
        shares = [weight / total for weight in weights]
        self.names = tuple(names)
        self.block = _MIN_BLOCK
        while self.block * min(shares) < _MIN_COUNT and len(shares) > 1:
            self.block *= 2
        if self.block > _MAX_BLOCK:
            rarest = shares.index(min(shares))
            raise ValueError(
                f"data.sources[{names[rarest]!r}].weight={weights[rarest]} is {min(shares):.1e} of the sum: fewer than "
                f"{_MIN_COUNT} samples in a million. The smallest weight beside the others' is "
                f"{(total - weights[rarest]) * _MIN_COUNT / (_MAX_BLOCK - _MIN_COUNT):.3g}; or remove the source."
            )
        self.counts = largest_remainder(shares, self.block)
        self._seed = seed
        self._table = lru_cache(maxsize=4)(self._make_table)

    def locate(self, samples: IndexArray) -> tuple[npt.NDArray[np.intp], IndexArray]:
        """Source number and index within that source, of each sample.

        Args:
            samples: Global sample indices, int64 ``[N]``.

        Returns:
            Source numbers ``[N]`` and source-local indices ``[N]`` (int64): 0, 1, 2, ... for each source as the
            samples run up.
        """
        if len(self.names) == 1:
            return np.zeros(samples.shape, dtype=np.intp), samples
        sources = np.empty(samples.shape, dtype=np.intp)
        local = np.empty(samples.shape, dtype=np.int64)
        blocks = samples // self.block
        for block in np.unique(blocks).tolist():
            chosen = np.flatnonzero(blocks == block)
            source_of, rank_of = self._table(block)
            place = samples[chosen] - block * self.block
            sources[chosen] = source_of[place]
            local[chosen] = rank_of[place] + block * self.counts[sources[chosen]]
        return sources, local

    def consumed(self, samples: int) -> IndexArray:
        """How many of the first ``samples`` samples came from each source, int64 ``[K]``."""
        if len(self.names) == 1:
            return np.array([samples], dtype=np.int64)
        block, rest = divmod(samples, self.block)
        source_of, _ = self._table(block)
        return self.counts * block + np.bincount(source_of[:rest], minlength=len(self.names))

    def _make_table(self, block: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int32]]:
        places = permute(np.arange(self.block, dtype=np.int64), self.block, "mixture", self._seed, block)
        source_of = np.searchsorted(np.cumsum(self.counts), places, side="right").astype(np.uint16)
        rank_of = np.empty(self.block, dtype=np.int32)
        by_source = np.argsort(source_of, kind="stable")
        starts = np.cumsum(self.counts) - self.counts
        rank_of[by_source] = np.arange(self.block) - np.repeat(starts, self.counts)
        return source_of, rank_of


def largest_remainder(shares: Sequence[float], total: int) -> IndexArray:
    """Whole numbers near ``total * share`` that sum to ``total``: round down, then add 1 where most was lost."""
    exact = np.asarray(shares, dtype=np.float64) * total
    counts = np.floor(exact).astype(np.int64)
    lost = exact - counts
    # stable: equal remainders go to the earlier source
    order = np.argsort(-lost, kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts
