"""Histograms of ranks: statements about whole bins are exact, however the histograms were made and added."""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_gc.histogram import BINS_MAX, EMPTY, Histogram, Tally

RANKS = st.integers(0, (1 << 61) - 1) | st.integers(0, 50) | st.integers((1 << 60) - 20, (1 << 60) + 20)


CHUNKS = st.lists(st.tuples(RANKS, st.integers(0, 1000)), max_size=60)


def histogram(chunks: list[tuple[int, int]]) -> Histogram:
    ranks, sizes = zip(*chunks, strict=True) if chunks else ((), ())
    return Histogram.of(np.array(ranks, np.int64), np.array(sizes, np.int64))


def tally(chunks: list[tuple[int, int]]) -> Tally:
    return Tally(len(chunks), sum(size for _, size in chunks))


@given(st.lists(CHUNKS, min_size=1, max_size=4), st.sampled_from([4, 16, BINS_MAX]), st.floats(0, 1.2))
def test_a_cut_frees_what_is_needed_and_at_most_one_bin_more(
    parts: list[list[tuple[int, int]]], bins_max: int, share: float
) -> None:
    bins = reduce(add, (histogram(part).coarsened(bins_max) for part in parts), EMPTY).coarsened(bins_max)
    chunks = [chunk for part in parts for chunk in part]
    total = tally(chunks)
    assert bins.total == total and len(bins) <= bins_max
    needed = int(share * total.bytes)
    cutoff = bins.cut(needed)
    freed = tally([chunk for chunk in chunks if chunk[0] < cutoff])
    assert bins.below(cutoff) == freed, "what the bins say is what lies there"
    assert bins.above(cutoff).total == total - freed
    assert freed.bytes >= min(needed, total.bytes)
    last_bin = bins.bytes[bins.starts < cutoff][-1:].sum()
    assert freed.bytes - last_bin < needed or not freed.bytes


@settings(max_examples=50)
@given(CHUNKS, CHUNKS, CHUNKS)
def test_a_cut_of_a_sum_is_exact_in_each_of_its_parts(
    first: list[tuple[int, int]], second: list[tuple[int, int]], third: list[tuple[int, int]]
) -> None:
    parts = [(chunks, histogram(chunks).coarsened(16)) for chunks in (first, second, third)]
    whole = reduce(add, (bins for _, bins in parts)).coarsened(8)
    for cutoff in [0, *whole.ends.tolist()]:
        for chunks, bins in parts:
            assert bins.below(cutoff) == tally([chunk for chunk in chunks if chunk[0] < cutoff])


def test_bins_are_as_fine_as_their_content_is_heavy() -> None:
    rng = np.random.default_rng(0)
    # Nearly everything within one narrow range, and a few chunks far above and below it.
    ranks = np.concatenate((rng.integers(1 << 50, (1 << 50) + (1 << 20), 100_000), rng.integers(0, 1 << 61, 100)))
    bins = Histogram.of(ranks, np.full(len(ranks), 1000))
    assert 500 <= len(bins) <= BINS_MAX
    assert bins.bytes.max() < bins.total.bytes / 500
