"""The index of segments' first chunks: a hash of their tokens, so that a prompt is probed at every offset.

It is a hint (SEGMENTS.md, S10): a wrong entry costs a look-up, a missing one a recomputation. So it needs no lock:
threads that write one slot at a time leave an entry that fits no window, or proposes a wrong length.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.tokens import TokenArray
from kvstore.zeros import untouched_zeros

Hashes = npt.NDArray[np.uint64]

WAYS = 4
BUCKET_BITS = 18
"""Room for 1,048,576 segments in 16 MiB. Only pages in use take memory."""

KEPT_MAX = 1 << 17
"""Powers are kept for windows of so many tokens, 2 MiB, and computed anew for more."""

_ODD = np.uint64(0xD6E8FEB86659FD93)
_INVERSE = np.uint64(pow(int(_ODD), -1, 1 << 64))
_MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(29), np.uint64(0xBF58476D1CE4E5B9)


def windows(tokens: TokenArray, size: int) -> Hashes:
    """A hash of each window of ``size`` tokens, by its first token; empty if there are fewer.

    Each token is mixed and weighted by a power of an odd number modulo 2**64, so that all windows take one sum. It is
    not cryptographic: it proposes, and addresses decide.
    """
    count = len(tokens) - size + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    weights = _weights if len(tokens) <= KEPT_MAX else _weights.__wrapped__
    powers, inverses = weights(1 << (len(tokens) - 1).bit_length())
    first, shift, second = _MIX
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * first
    mixed ^= mixed >> shift
    mixed *= second
    mixed *= powers[: len(tokens)]
    sums = np.zeros(len(tokens) + 1, np.uint64)
    np.cumsum(mixed, out=sums[1:])
    hashes: Hashes = (sums[size:] - sums[:-size]) * inverses[:count]
    hashes |= hashes == 0  # 0 marks an empty slot
    return hashes


@lru_cache(maxsize=4)
def _weights(count: int) -> tuple[Hashes, Hashes]:
    """Powers of the odd number, and of its inverse, from the first on."""
    both = np.full((2, count), [[_ODD], [_INVERSE]], np.uint64).cumprod(1)
    both.flags.writeable = False
    return both[0], both[1]


class Index:
    """Known first chunks, by the hash of their tokens: at most 4 * 2**bucket_bits, those used last."""

    def __init__(self, bucket_bits: int = BUCKET_BITS) -> None:
        self._shift = np.uint64(64 - bucket_bits)
        shape = (1 << bucket_bits, WAYS)
        self._hashes = untouched_zeros(shape, np.uint64)
        self._chunks = untouched_zeros(shape, np.uint32)
        self._used = untouched_zeros(shape, np.uint32)
        self._turn = 0

    def __len__(self) -> int:
        return int(np.count_nonzero(self._hashes))

    def add(self, hashes: Hashes, chunks: npt.NDArray[np.integer[Any]]) -> None:
        """Takes in segments by the hashes of their first chunks, with the numbers of their chunks; or renews them."""
        self._turn = (self._turn + 1) & 0xFFFFFFFF
        buckets = hashes >> self._shift
        found = self._hashes[buckets] == hashes[:, None]
        known = found.any(1)
        rows, ways = buckets[known], found[known].argmax(1)
        self._chunks[rows, ways] = np.maximum(self._chunks[rows, ways], chunks[known])
        self._used[rows, ways] = self._turn
        for at in np.flatnonzero(~known).tolist():
            bucket = int(buckets[at])
            way = self._oldest(bucket)
            self._chunks[bucket, way] = chunks[at]
            self._used[bucket, way] = self._turn
            self._hashes[bucket, way] = hashes[at]

    def lengths(self, hashes: Hashes) -> npt.NDArray[np.uint32]:
        """For each hash the number of chunks of the segment that begins so; 0 if none is known."""
        buckets = (hashes >> self._shift).astype(np.intp)
        found: npt.NDArray[Any] = self._hashes.take(buckets, axis=0) == hashes[:, None]
        known = np.flatnonzero(found.view(np.uint32))  # all four ways of a bucket as one number: much faster than any()
        lengths = np.zeros(len(hashes), np.uint32)
        lengths[known] = (self._chunks[buckets[known]] * found[known]).max(1)
        return lengths

    def _oldest(self, bucket: int) -> int:
        empty = np.flatnonzero(self._hashes[bucket] == 0)
        # Turns wrap round, after which some old entries seem new: a hint may be wrong.
        return int(empty[0]) if len(empty) else int(self._used[bucket].argmin())
