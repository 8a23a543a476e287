"""Bytes by rank: a histogram whose bins are narrow where there are many bytes.

Pure arithmetic. A bin is a range of ranks that begins at a multiple of its width, a power of two. Two such ranges are
disjoint, or one contains the other. So histograms of different shards can be added without splitting a bin, and
counts of whole bins stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]

BINS_MAX = 4096
"""In memory, 32 bytes each."""
RANK_BITS = 62


@dataclass(frozen=True, slots=True)
class Tally:
    """A count, and the bytes together."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.count + other.count, self.bytes + other.bytes)

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.count - other.count, self.bytes - other.bytes)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Bins in order of rank, disjoint. Bin i holds ranks from ``starts[i]``, ``2 ** levels[i]`` of them."""

    starts: Column
    levels: Column
    counts: Column
    bytes: Column

    @classmethod
    def of(cls, ranks: Column, sizes_bytes: Column) -> Histogram:
        """Makes a histogram of some chunks, as fine as BINS_MAX allows."""
        order = np.argsort(ranks)
        bins = _folded(ranks[order], np.zeros(len(ranks), np.int64), np.ones(len(ranks), np.int64), sizes_bytes[order])
        return bins.coarsened(BINS_MAX)

    @property
    def ends(self) -> Column:
        """The first rank beyond each bin."""
        return self.starts + (np.int64(1) << self.levels)

    @property
    def total(self) -> Tally:
        """All bins together."""
        return Tally(int(self.counts.sum()), int(self.bytes.sum()))

    def __len__(self) -> int:
        return len(self.starts)

    def __add__(self, other: Histogram) -> Histogram:
        if not len(self) or not len(other):
            return self if len(self) else other
        columns = [
            np.concatenate(pair)
            for pair in (
                (self.starts, other.starts),
                (self.levels, other.levels),
                (self.counts, other.counts),
                (self.bytes, other.bytes),
            )
        ]
        # If two bins begin together, the wider one comes first: it contains the other.
        order = np.lexsort((-columns[1], columns[0]))
        return _folded(*(column[order] for column in columns)).coarsened(BINS_MAX)

    def cut(self, bytes_needed: int) -> int:
        """The least cut-off with at least ``bytes_needed`` (or everything) below it: at most one bin too much."""
        if bytes_needed <= 0 or not len(self):
            return 0
        last = int(np.searchsorted(np.cumsum(self.bytes), bytes_needed))
        return int(self.ends[min(last, len(self) - 1)])

    def below(self, cutoff: int) -> Tally:
        """Count and bytes below a cut-off that ``cut`` gave, for this histogram or a sum that contains it."""
        taken = self.starts < cutoff
        return Tally(int(self.counts[taken].sum()), int(self.bytes[taken].sum()))

    def above(self, cutoff: int) -> Histogram:
        """The bins from a cut-off on."""
        left = self.starts >= cutoff
        return Histogram(self.starts[left], self.levels[left], self.counts[left], self.bytes[left])

    def coarsened(self, bins_max: int) -> Histogram:
        """Merges light neighbours until at most ``bins_max`` bins are left."""
        bins, limit = self, 2 * int(self.bytes.sum()) // bins_max + 1
        while len(bins) > bins_max:
            # Below the usual distance between neighbours there is little to merge, and much to search.
            usual = int(np.median(np.diff(bins.starts)))
            for level in range(max(1, usual.bit_length()), RANK_BITS + 1):
                bins = bins._merged(level, limit)
            limit *= 2
        return bins

    def _merged(self, level: int, limit_bytes: int) -> Histogram:
        """Merges the bins that share a range of that level, if they hold at most ``limit_bytes``."""
        ranges = self.starts >> level
        heads = np.flatnonzero(np.diff(ranges, prepend=-1))
        shared = np.diff(heads, append=len(self))
        merge = (shared > 1) & (np.add.reduceat(self.bytes, heads) <= limit_bytes)
        if not merge.any():
            return self
        wide = np.repeat(merge, shared)
        starts = np.where(wide, ranges << level, self.starts)
        levels = np.where(wide, level, self.levels)
        return _folded(starts, levels, self.counts, self.bytes)


def _folded(starts: Column, levels: Column, counts: Column, sizes_bytes: Column) -> Histogram:
    """Merges bins that contain others. They come in order, the wider one first."""
    if not len(starts):
        return Histogram(starts, levels, counts, sizes_bytes)
    reach = np.maximum.accumulate(starts + (np.int64(1) << levels))
    heads = np.flatnonzero(np.concatenate(([True], starts[1:] >= reach[:-1])))
    return Histogram(
        starts[heads],
        levels[heads],
        np.add.reduceat(counts, heads),
        np.add.reduceat(sizes_bytes, heads),
    )


EMPTY = Histogram(*(np.zeros(0, np.int64) for _ in range(4)))
