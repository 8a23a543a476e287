"""Segments in a prompt: which ranges to ask the store for, and what its answers make of them. Pure."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core.address import TokenArray, Tokens
from kvstore.core.buffers import token_array, untouched_zeros
from kvstore.core.validate import brief
from kvstore.errors import InvalidRequest

# A found range of a prompt: the leading chunks of one stored segment.


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens ``start`` to ``end`` (exclusive) of a prompt are the first tokens of a stored segment.

    ``end - start`` is a multiple of the chunk length. ``tokens`` are those of the range, shape ``(end - start,)``.
    """

    start: int
    end: int
    tokens: TokenArray = field(repr=False, compare=False)

    def __len__(self) -> int:
        return self.end - self.start

    def leading(self, count: int) -> Match:
        """The first ``count`` tokens of it."""
        return Match(self.start, self.start + count, self.tokens[:count])


# A search: the question that a client asks about the segments of a prompt; checked here, once.


STARTS_MAX = 65_536

Range = tuple[int, int]
"""Start and end in the prompt, in tokens."""


@dataclass(frozen=True, slots=True)
class Search:
    """A prompt of tokens, shape ``(n,)``, and where its segments may begin. Made by ``of``."""

    tokens: TokenArray
    starts: tuple[int, ...] | None
    """The places where segments begin, ascending, each up to the next one or the end; None: anywhere."""
    after: int
    """Segments that begin before this place are left out: the length of the exact prefix."""

    @classmethod
    def of(cls, tokens: Tokens, starts: Sequence[int] | None = None, after: int = 0) -> Search:
        """Raises InvalidRequest for tokens that are none, and for places that are none of the prompt."""
        ids = token_array(tokens)
        try:
            place = operator.index(after)
        except TypeError as cause:
            raise InvalidRequest(f"after={brief(after)}: expected an integer") from cause
        if not 0 <= place <= len(ids):
            raise InvalidRequest(f"after={brief(place)}: expected 0 to {len(ids)}, the token count")
        return cls(ids, None if starts is None else _places(starts, len(ids)), place)

    @property
    def given(self) -> list[Range]:
        """The segments between ``starts``; those that begin before ``after`` are left out."""
        return [
            (start, end) for start, end in pairwise((*(self.starts or ()), len(self.tokens))) if start >= self.after
        ]


def _places(starts: Sequence[int], total: int) -> tuple[int, ...]:
    """Raises InvalidRequest for starts that are no integers, are too many, or do not ascend within the prompt."""
    try:
        places = tuple(operator.index(start) for start in starts)
    except TypeError as cause:
        raise InvalidRequest(f"starts are {brief(starts)}: expected a sequence of integers") from cause
    if len(places) > STARTS_MAX:
        raise InvalidRequest(f"{len(places)} starts are over the limit of {STARTS_MAX}")
    if any(start >= end for start, end in pairwise(places)) or (places and not 0 <= places[0] <= places[-1] <= total):
        raise InvalidRequest(f"starts are {brief(list(places[:8]))}...: expected ascending places from 0 to {total}")
    return places


# The index of segments' first chunks: a hash of their tokens, so that a prompt is probed at every offset.
#
# It is a hint (SEGMENTS.md, S10): a wrong entry costs a look-up, a missing one a recomputation. So it needs no lock:
# threads that write one slot at a time leave an entry that fits no window, or proposes a wrong length.


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


ROUNDS_MAX = 8
"""Rounds of questions of one search at any offset: more than one only if a prompt leaves a segment in its middle."""
MATCHES_MAX = STARTS_MAX
"""Ranges that one search finds; what is behind them is a miss."""
BLOCK = 65_536
"""Offsets whose hashes are computed in one batch, about 100 bytes each: a long prompt takes no more memory."""

Ask = Callable[[Sequence[Range]], Sequence[int]]
"""The number of leading chunks that the store has of each range, as of a prompt of its own."""
Places = npt.NDArray[np.intp]


def find(search: Search, chunk_tokens: int, index: Index, ask: Ask) -> list[Match]:
    """Returns the ranges of a prompt that are stored segments; ``index`` learns them, and that they were used."""
    tokens = search.tokens
    if search.starts is None:
        matches = find_anywhere(tokens, search.after, chunk_tokens, index, ask)
    else:
        matches = find_given(tokens, search.given, chunk_tokens, ask)
    if matches:
        firsts = np.concatenate([match.tokens[:chunk_tokens] for match in matches])
        chunks = np.array([len(match) // chunk_tokens for match in matches])
        index.add(windows(firsts, chunk_tokens)[::chunk_tokens], chunks)
    return matches


def find_given(tokens: TokenArray, ranges: Sequence[Range], chunk_tokens: int, ask: Ask) -> list[Match]:
    """Looks up each range as a segment."""
    whole = [(start, end) for start, end in ranges if end - start >= chunk_tokens]
    return [
        _match(tokens, start, min(count, (end - start) // chunk_tokens) * chunk_tokens)
        for (start, end), count in zip(whole, ask(whole) if whole else (), strict=True)
        if count
    ]


def find_anywhere(tokens: TokenArray, after: int, chunk_tokens: int, index: Index, ask: Ask) -> list[Match]:
    """Looks for segments at every offset from ``after`` on: the leftmost first, each as far as the store has it."""
    places, lengths = _candidates(tokens, after, chunk_tokens, index)
    matches: list[Match] = []
    for _ in range(ROUNDS_MAX):
        free, room = gaps(len(tokens), matches, after), MATCHES_MAX - len(matches)
        asked = _proposals(places, lengths, free, chunk_tokens)[:room]
        if not asked:
            break
        found = [
            _match(tokens, start, count * chunk_tokens)
            for (start, _end), count in zip(asked, ask(asked), strict=True)
            if count
        ]
        done = places.searchsorted([start for start, _ in asked])
        places, lengths = np.delete(places, done), np.delete(lengths, done)
        matches = sorted([*matches, *found], key=lambda match: match.start)
    return matches


def _candidates(tokens: TokenArray, after: int, chunk_tokens: int, index: Index) -> tuple[Places, npt.NDArray[Any]]:
    """Returns the offsets where ``index`` knows a segment, ascending, and the numbers of its chunks."""
    places, lengths = [np.empty(0, np.intp)], [np.empty(0, np.uint32)]
    for low in range(after, len(tokens) - chunk_tokens + 1, BLOCK):
        known = index.lengths(windows(tokens[low : low + BLOCK + chunk_tokens - 1], chunk_tokens))
        at = np.flatnonzero(known)
        places.append(at + low)
        lengths.append(known[at])
    return np.concatenate(places), np.concatenate(lengths)


def _proposals(places: Places, lengths: npt.NDArray[Any], free: Sequence[Range], chunk_tokens: int) -> list[Range]:
    """Chooses disjoint ranges from the left, each as long as its segment is known to be; no more than MATCHES_MAX."""
    chosen: list[Range] = []
    starts: list[int] = places.tolist()  # which takes a tenth of the time to look at
    for low, high in free:
        at = bisect_left(starts, low)
        while at < len(starts) and starts[at] + chunk_tokens <= high and len(chosen) < MATCHES_MAX:
            start = starts[at]
            end = start + min(int(lengths[at]), (high - start) // chunk_tokens) * chunk_tokens
            chosen.append((start, end))
            at = bisect_left(starts, end, at)
    return chosen


def gaps(total: int, matches: Sequence[Match], after: int) -> list[Range]:
    """The ranges between matches, from ``after`` to the end."""
    ends = [after, *(match.end for match in matches)]
    starts = [*(match.start for match in matches), total]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


def _match(tokens: TokenArray, start: int, count: int) -> Match:
    # A copy: engines reuse their token buffers while a match is alive.
    return Match(start, start + count, tokens[start : start + count].copy())
